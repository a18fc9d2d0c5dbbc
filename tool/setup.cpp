// From options to how a layer runs.
#include "tool/setup.hpp"

#include <algorithm>
#include <thread>

#include "switchyard/cpu_isa.hpp"
#include "tool/usage_error.hpp"
#include "tool/words.hpp"

namespace switchyard::tool {
namespace {

Backend choose_backend(const Options& options) {
  if (options.backend == "cuda") {
    throw UsageError("--backend: cuda is not built in, built in: cpu");
  }
  return Backend::kCpu;
}

}  // namespace

World choose_world(const Options& options) {
  if (!options.engine.empty() && options.engine != "threads") {
    throw UsageError("--engine: {} is not built in, built in: threads", options.engine);
  }
  World world;
  world.num_ranks = static_cast<int>(options.ranks.value_or(1));
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  world.num_threads = static_cast<int>(options.threads.value_or(std::max(cores, world.num_ranks)));
  return world;
}

void choose_isa(const Options& options) {
  if (options.isa.empty()) return;
  std::string usable;
  for (const CpuIsaStatus& status : cpu_isas()) {
    if (status.reason.empty())
      usable += (usable.empty() ? "" : ", ") + std::string(to_string(status.isa));
  }
  const std::optional<CpuIsa> isa = parse_cpu_isa(options.isa);
  if (!isa) throw UsageError("--isa: '{}' is unknown, here are {}", options.isa, usable);
  for (const CpuIsaStatus& status : cpu_isas()) {
    if (status.isa == *isa && !status.reason.empty()) {
      throw UsageError("--isa: {} cannot be used, {}; here are {}", options.isa, status.reason,
                       usable);
    }
  }
  force_isa(isa);
}

LayerOptions layer_options(const Options& options) {
  choose_isa(options);
  LayerOptions out;
  out.backend = choose_backend(options);
  if (!options.compute.empty()) out.compute = dtype_of(options.compute);
  out.layout = layout_of(options.layout);
  out.capacity_factor = options.capacity_factor;
  out.drop_policy = drop_policy_of(options.drop_policy);
  if (!options.wire.empty()) out.wire = dtype_of(options.wire);
  out.batch_invariant = options.batch_invariant;
  out.rank_invariant = options.rank_invariant;
  out.quantize_q8 = options.weights == "q8";
  return out;
}

}  // namespace switchyard::tool
