// `switchyard bench`: cases from the command line, one after the other.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/cases/paths_case.hpp"
#include "bench/cases/suites.hpp"
#include "bench/peers/sonicmoe.hpp"
#include "bench/peers/stored.hpp"
#include "bench/peers/torch.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/error.hpp"
#include "tool/bench/base_case.hpp"
#include "tool/bench/case_table.hpp"
#include "tool/bench/exchange.hpp"
#include "tool/bench/generate.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/output_files.hpp"
#include "tool/progress.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {
namespace {

using bench::CaseResult;
using bench::LayerCase;
using bench::SuiteCase;

/// Of a suite's cases those that --only names.
std::vector<SuiteCase> only_named(const Options& options, std::vector<SuiteCase> cases) {
  std::vector<std::string> names;
  for (const SuiteCase& c : cases) {
    if (std::find(names.begin(), names.end(), c.layer.name) == names.end()) {
      names.push_back(c.layer.name);
    }
  }
  for (const std::string& name : options.only) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      throw UsageError("--only: '{}' is no case of the suite {}, want {}", name, options.suite,
                       fmt::join(names, ", "));
    }
  }
  if (options.only.empty()) return cases;
  std::erase_if(cases, [&](const SuiteCase& c) {
    return std::find(options.only.begin(), options.only.end(), c.layer.name) == options.only.end();
  });
  return cases;
}

/// Whether a suite is about a CPU alone.
bool is_of_cpu(std::string_view suite) { return suite == "cpu-experts" || suite == "load"; }

/// Whether torch has a part in it.
bool has_torch(std::string_view suite) {
  return !is_of_cpu(suite) && suite != "soft-moe" && suite != "chain";
}

std::vector<SuiteCase> choose_cases(const Options& options, const LayerCase& base) {
  if (!options.router.empty() && (!options.suite.empty() || options.skew != "uniform")) {
    throw UsageError("--router: {} given with {}, want it with --model or sizes alone",
                     options.router,
                     options.suite.empty() ? "--skew " + options.skew : "--suite " + options.suite);
  }
  const bool sized = !options.model.empty() || options.hidden || options.inner || options.top_k ||
                     !options.experts.empty();
  const bool layers_only = options.suite.empty()
                               ? !identity_wanted(options)
                               : options.suite == "layer" || options.suite == "training";
  if (base.world != nullptr && !layers_only) {
    throw UsageError("--engine: {} runs whole layers, want --engine threads for this",
                     base.world->engine());
  }
  if (base.options.backend == Backend::kCuda && is_of_cpu(options.suite)) {
    throw UsageError("--backend: the suite {} is about the CPU, want cpu for it", options.suite);
  }
  if (base.options.backend == Backend::kCuda && base.num_ranks > 1 &&
      (!layers_only || options.suite == "layer")) {
    throw UsageError(
        "--ranks: {} given, but with --backend cuda ranks run layers of a --model, of sizes or of "
        "the suite training, want --ranks 1 for this",
        base.num_ranks);
  }
  if (options.checkpoint.empty() != (options.suite != "load")) {
    throw UsageError("--checkpoint: {}", options.checkpoint.empty()
                                             ? "missing, the suite load wants one"
                                             : "only the suite load reads one");
  }
  if (base.options.weights == WeightFormat::kStored && options.suite != "load") {
    throw UsageError(
        "--weights: stored is what a checkpoint has, want --suite load for it, or fp8, mxfp4, int4 "
        "or nvfp4");
  }
  if (options.suite.empty()) {
    if (!options.only.empty()) throw UsageError("--only: cases of a suite, want --suite too");
    return model_cases(options, base);
  }
  if (sized || !options.num_tokens.empty()) {
    throw UsageError("--suite: {} has its own sizes, want no others", options.suite);
  }
  if (!layers_only && base.num_ranks > 1 && options.suite != "pack") {
    throw UsageError("--ranks: {} given, but the suite {} runs on one", base.num_ranks,
                     options.suite);
  }
  return only_named(options, suite_cases(options.suite, base, options.scale));
}

bool has_peer(const Options& options, std::string_view name) {
  return std::find(options.peers.begin(), options.peers.end(), name) != options.peers.end();
}

/// Null: nobody has asked for it.
std::unique_ptr<bench::TorchPeer> torch_peer(const Options& options, const LayerCase& base) {
  if (!has_peer(options, "torch")) return nullptr;
  if (base.num_ranks > 1) {
    throw UsageError("--peer: torch runs beside one rank, want --ranks 1");
  }
  if (!has_torch(options.suite)) {
    throw UsageError("--peer: torch is none of the suite {}", options.suite);
  }
  try {
    return std::make_unique<bench::TorchPeer>(base.options.backend);
  } catch (const Error& error) {
    throw UsageError("--peer: torch cannot be used: {}", message_of(error));
  }
}

/// Null: nobody has asked for it.
std::unique_ptr<bench::SonicmoePeer> sonicmoe_peer(const Options& options, const LayerCase& base) {
  if (!has_peer(options, "sonicmoe")) return nullptr;
  if (options.suite != "forward" && options.suite != "training") {
    throw UsageError(
        "--peer: sonicmoe runs whole layers of many tokens, want --suite forward or training");
  }
  if (base.num_ranks > 1) {
    throw UsageError("--peer: sonicmoe runs beside one rank, want --ranks 1");
  }
  if (base.options.backend != Backend::kCuda || options.scale != 1) {
    throw UsageError("--peer: sonicmoe runs on a GPU at full size, want --backend cuda, --scale 1");
  }
  try {
    return std::make_unique<bench::SonicmoePeer>();
  } catch (const Error& error) {
    throw UsageError("--peer: sonicmoe cannot be used: {}", message_of(error));
  }
}

/// What a stored peer's layer has not, in words of the command line; empty: nothing.
std::string not_of_stored_peers(const Options& options, const LayerCase& base) {
  if (!options.suite.empty() && options.suite != "forward") return "--suite " + options.suite;
  if (base.layout != "compact") return "--layout " + base.layout;
  if (base.skew.starts_with("hot")) return "--skew " + base.skew;
  if (!options.router.empty()) return "--router " + options.router;
  if (identity_wanted(options)) return "--experts identity";
  if (options.plain) return "--plain";
  if (options.capacity_factor) return "--capacity-factor";
  if (base.options.batch_invariant) return "--batch-invariant";
  return {};
}

/// Null: nobody has asked for one.
std::unique_ptr<bench::StoredPeer> stored_peer(const Options& options, const LayerCase& base) {
  const auto is_stored = [](const std::string& name) { return bench::StoredPeer::has(name); };
  const auto& peers = options.peers;
  const auto named = std::find_if(peers.begin(), peers.end(), is_stored);
  if (named == peers.end()) return nullptr;
  if (std::count_if(peers.begin(), peers.end(), is_stored) > 1) {
    throw UsageError("--peer: triton-mxfp4 and deepgemm are of other weights, want one of them");
  }
  const WeightFormat format = bench::StoredPeer::format_of(*named);
  if (base.options.weights != format) {
    throw UsageError("--peer: {} multiplies weights as they are stored, want --weights {}", *named,
                     to_string(format));
  }
  const bool in_fp8 = base.options.compute == DType::kF8E4M3;
  if (format == WeightFormat::kE4M3 && !in_fp8) {
    throw UsageError("--peer: {} multiplies rows in e4m3, want --compute fp8", *named);
  }
  if (const std::string word = not_of_stored_peers(options, base); !word.empty()) {
    throw UsageError("--peer: {} is a gated top-k layer, compact and dropless, want no {}", *named,
                     word);
  }
  if (base.num_ranks > 1) {
    throw UsageError("--peer: {} runs beside one rank, want --ranks 1", *named);
  }
  if (base.options.backend != Backend::kCuda || options.scale != 1) {
    throw UsageError("--peer: {} runs on a GPU at full size, want --backend cuda, --scale 1",
                     *named);
  }
  try {
    return std::make_unique<bench::StoredPeer>(*named);
  } catch (const Error& error) {
    throw UsageError("--peer: {} cannot be used: {}", *named, message_of(error));
  }
}

/// Only the stages that --stages asks for.
void filter_stages(const Options& options, CaseResult& result) {
  if (options.stages.empty()) return;
  std::erase_if(result.stages, [&](const bench::StageFigures& f) {
    const auto& wanted = options.stages;
    return std::find(wanted.begin(), wanted.end(), f.stage) == wanted.end();
  });
}

void check_stages(const Options& options) {
  constexpr std::string_view kStages[] = {"router_gemm",
                                          "select",
                                          "plan",
                                          "pack",
                                          "exchange",
                                          "gemm1",
                                          "gemm1+activation",
                                          "activation",
                                          "gemm2",
                                          "gemm2+combine",
                                          "combine",
                                          "shared",
                                          "layer",
                                          "read",
                                          "router_backward",
                                          "experts_backward",
                                          "shared_backward",
                                          "copy",
                                          "load",
                                          "soft_logits",
                                          "soft_dispatch",
                                          "soft_combine",
                                          "residual"};
  for (const std::string& stage : options.stages) {
    if (std::find(std::begin(kStages), std::end(kStages), stage) == std::end(kStages)) {
      throw UsageError("--stages: '{}' is unknown, want {}", stage,
                       fmt::join(std::begin(kStages), std::end(kStages), ", "));
    }
  }
}

void check_output_files(const Options& options) {
  const NamedFile results{"--results", options.results};
  const NamedFile csv{"--csv", options.csv};
  check_output_place(results, Writing::kAppend);
  check_output_place(csv);
  std::vector<NamedFile> inputs;
  if (!options.checkpoint.empty()) {
    for (const auto& file : Checkpoint(options.checkpoint).files()) {
      inputs.push_back({"--checkpoint", file});
    }
  }
  check_outputs_apart({results, csv}, inputs);
}

}  // namespace

int bench_command(const Options& options) {
  check_output_files(options);
  if (!options.variants.empty() && options.suite != "all2all") {
    throw UsageError("--variant: {} given, but only --suite all2all has variants",
                     fmt::join(options.variants, ","));
  }
  if (options.suite == "generate") return bench_generate(options);
  const World world = choose_world(options);
  if (options.suite == "all2all") return bench_all2all(options, world);
  if (options.suite == "fixed-size") return bench_fixed_size(options, world);
  check_stages(options);
  LayerCase base = base_case(options, world);
  const std::unique_ptr<bench::TorchPeer> torch = torch_peer(options, base);
  base.peer_torch = torch.get();
  const std::unique_ptr<bench::SonicmoePeer> sonicmoe = sonicmoe_peer(options, base);
  base.peer_sonicmoe = sonicmoe.get();
  const std::unique_ptr<bench::StoredPeer> stored = stored_peer(options, base);
  base.peer_stored = stored.get();
  const std::vector<SuiteCase> cases = choose_cases(options, base);
  const bench::Machine machine = bench::this_machine();
  const bench::Limits limits = limits_of(world, base.options.backend);
  if (!world.is_first()) {  // rank 0 reports for all
    for (const SuiteCase& c : cases) {
      static_cast<void>(run_case_at(label_of(c.layer), c, machine, limits));
    }
    return kFine;
  }
  BenchReport report(options, machine, limits);
  ProgressBar bar(static_cast<int>(cases.size()));
  std::vector<CaseResult> results;
  const auto write_outputs = [&] {
    if (!options.csv.empty()) {
      for (CaseResult& result : results) filter_stages(options, result);
      write_text(options.csv, bench::to_csv(results));
    }
    report.finish();
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string label = label_of(cases[i].layer);
    bar.show(static_cast<int>(i), label);
    std::vector<CaseResult> done;
    try {
      done = run_case_at(label, cases[i], machine, limits);
    } catch (const Error&) {  // what is done is kept
      bar.clear();
      if (!results.empty()) write_outputs();
      throw;
    }
    bar.clear();
    for (CaseResult& result : done) {
      results.push_back(std::move(result));
      CaseResult shown = results.back();
      filter_stages(options, shown);
      report.add(shown);
    }
  }
  for (const CaseResult& verdict : bench::judge_paths(results)) report.conclude(verdict);
  write_outputs();
  const bool holds = std::all_of(results.begin(), results.end(),
                                 [](const CaseResult& result) { return result.holds; });
  return holds ? kFine : kCheckFailed;
}

}  // namespace switchyard::tool
