// `switchyard verify`: random layers against the reference.
#include "verify/verify.hpp"

#include <algorithm>
#include <iostream>
#include <map>

#include "comm/ranks/launch.hpp"
#include "core/check.hpp"
#include "core/environment.hpp"
#include "switchyard/device.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/progress.hpp"
#include "tool/setup.hpp"
#include "verify/perft/check_perft.hpp"

namespace switchyard::tool {
namespace {

/// Only numbers of ranks that the launcher's processes can be.
void choose_ranks(const Options& options, const Launch& launch, std::vector<int>& ranks) {
  for (const std::int64_t number : options.ranks_list) {
    if (number > launch.world) {
      throw UsageError("--ranks: {} given, but {} has started {}, want at most that", number,
                       launch.launcher, launch.world);
    }
  }
  std::erase_if(ranks, [&](int number) { return number > launch.world; });
}

/// NCCL takes one rank a GPU.
void fit_ranks_to_gpus(const Options& options, std::vector<int>& ranks) {
  const auto gpus = static_cast<int>(find_gpus().list.size());
  for (const std::int64_t number : options.ranks_list) {
    if (number > gpus) {
      throw UsageError("--ranks: {} given, but --engine {} takes one rank a GPU, here are {}",
                       number, options.engine, gpus);
    }
  }
  std::erase_if(ranks, [&](int number) { return number > gpus; });
}

void check_spelling_of_perft(const std::string& spelling) {
  try {
    verify::check_perft_spelling(spelling);
  } catch (const Error& error) {
    throw UsageError("--router: {}", message_of(error));
  }
}

}  // namespace

int verify_command(const Options& options) {
  const LayerOptions layer = layer_options(options);
  verify::VerifyOptions out;
  out.cases = options.cases;
  out.seed = static_cast<std::uint64_t>(options.seed);
  if (!options.ranks_list.empty()) {
    out.ranks.assign(options.ranks_list.begin(), options.ranks_list.end());
  }
  if (layer.backend == Backend::kCuda && options.ranks_list.empty()) out.ranks = {1};
  if (!options.threads_list.empty()) {
    out.threads.assign(options.threads_list.begin(), options.threads_list.end());
  }
  out.backend = layer.backend;
  out.device_engine = layer.device_engine;
  // Without being told, all instruction sets take turns.
  const char* const forced = value_of(Variable::kIsa);
  if (!options.isa.empty() || forced != nullptr) out.isas.assign(1, isa_in_use());
  out.case_json = options.verify_case;
  out.fault = options.fault;
  out.soak = options.soak;
  if (options.soak > 0 && (!options.fault.empty() || !options.verify_case.empty())) {
    throw UsageError("--soak: {} given, want neither --fault nor --case beside it", options.soak);
  }
  for (const verify::Pass pass :
       {verify::Pass::kForward, verify::Pass::kBackward, verify::Pass::kBoth}) {
    if (options.verify_pass == to_string(pass)) out.pass = pass;
  }
  if (out.pass != verify::Pass::kForward && (options.soak > 0 || !options.fault.empty())) {
    throw UsageError("--pass: {} given, want neither --soak nor --fault beside it",
                     options.verify_pass);
  }
  if (!options.router.empty()) {
    if (!options.verify_case.empty() || options.soak > 0 || !options.fault.empty()) {
      throw UsageError("--router: {} given, want neither --case, --soak nor --fault beside it",
                       options.router);
    }
    constexpr std::int32_t kMany = 1 << 20;  // cases have few: K is theirs
    if (verify::is_perft(options.router)) {
      check_spelling_of_perft(options.router);
    } else if (options.router != "all") {
      constexpr bool kAlone = false;  // logits of a layer before are made up
      (void)router_of(options.router, {.num_experts = kMany, .kind = TopKRouter{.top_k = 1}},
                      kAlone);
    }
    out.router = options.router;
  }
  if (!options.verify_weights.empty()) {
    if (!options.verify_case.empty() || options.soak > 0 || !options.fault.empty()) {
      throw UsageError("--weights: {} given, want neither --case, --soak nor --fault beside it",
                       options.verify_weights);
    }
    out.weights = weights_of(options.verify_weights);
  }
  if (!options.verify_compute.empty()) {
    if (out.backend != Backend::kCuda || out.weights != WeightFormat::kE4M3) {
      throw UsageError("--compute: {} given, want --backend cuda --weights fp8 beside it",
                       options.verify_compute);
    }
    out.fp8_rows = true;
  }
  out.timeout = std::chrono::milliseconds(options.timeout_ms);
  out.json = options.json;
  // Under a launcher every process comes here as one rank of the same cases.
  const Launch launch = read_launch();
  check_engine(options, launch);
  if (layer.device_engine != DeviceEngine::kAuto) fit_ranks_to_gpus(options, out.ranks);
  if (options.soak > 0 && options.ranks_list.empty()) {
    out.ranks = {launch.world > 1 ? launch.world : 4};
  }
  std::shared_ptr<Communicator> world;
  std::map<int, std::unique_ptr<Communicator>> groups;
  if (launch.world > 1) {
    choose_ranks(options, launch, out.ranks);
    world = make_launched_rank();
    world->set_timeout(std::max(out.timeout, std::chrono::milliseconds(60000)));
    out.world = world.get();
    out.first_ranks = [&](int ranks) {
      if (!groups.contains(ranks)) groups[ranks] = make_launched_rank(ranks);
      return groups[ranks].get();
    };
  }
  const bool shown = launch.rank == 0;
  ProgressBar bar(!shown ? 0 : static_cast<int>(std::min<std::int64_t>(options.cases, 1 << 30)));
  out.progress = [&bar, shown = std::int64_t{0}](std::int64_t done, std::int64_t all) mutable {
    constexpr std::int64_t kStep = 16;  // other workers' cases count too: no number comes for sure
    if (done == all) {
      bar.clear();
    } else if (done / kStep != shown) {
      shown = done / kStep;
      bar.show(static_cast<int>(done), "cases");
    }
  };
  return verify::run_verify(out, std::cout);
}

}  // namespace switchyard::tool
