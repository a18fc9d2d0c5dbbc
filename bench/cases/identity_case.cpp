// Experts that give back what they get: what is left are plan, pack, exchange and combine.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/cases/cases.hpp"
#include "bench/cases/identity_rank.hpp"
#include "bench/measure/run_clock.hpp"
#include "bench/peers/torch.hpp"
#include "comm/ranks/gather.hpp"
#include "core/half.hpp"
#include "switchyard/comm.hpp"

namespace switchyard::bench {
namespace {

/// What the runs of one rank took.
struct IdentityTimes {
  StageTimes stages;
  std::vector<double> pair_us;  ///< Pack and combine alone, as one graph; CUDA.
};

void run_rank(IdentityProblem& problem, Communicator* communicator, int threads,
              IdentityTimes& out) {
  RunCounter counter(problem.c.count);
  const Backend backend = problem.c.options.backend;
  IdentityRank rank(problem, communicator, threads);
  const auto clock = make_run_clock(backend, out.stages);
  for (int run = 0; run < counter.total(); ++run) {
    if (communicator != nullptr) communicator->barrier("start of a run");
    if (run == counter.warmup()) {
      out.stages.forget();
      out.pair_us.clear();
    }
    out.stages.start_run();
    const double us = clock->run(
        &rank, [&](StageRecorder* recorder, void* stream) { rank.run(recorder, stream); });
    out.stages.add("layer", {}, us);
    if (backend == Backend::kCuda) {
      out.pair_us.push_back(
          clock->run_whole(&out, [&](StageRecorder*, void* stream) { rank.run_pair(stream); }));
    }
    if (run == 0 && counter.wants_time()) {
      const double seconds = us * 1e-6;
      counter.set_time(std::chrono::duration<double>(
          communicator == nullptr ? seconds : from_first(*communicator, seconds)));
    }
  }
  rank.fetch();
}

/// Pack and combine together, and their rate by the two ways in which bytes are counted: the
/// strict one, all rows read and written once, and that of a published table.
nlohmann::json pair_figures(const LayerCase& c, const CaseResult& result,
                            const std::vector<double>& pair_us) {
  double us = pair_us.empty() ? 0 : statistics(pair_us).median;
  for (const StageFigures& stage : result.stages) {
    if (pair_us.empty() && (stage.stage == "pack" || stage.stage == "combine")) {
      us += stage.us.median;
    }
  }
  const auto row = static_cast<double>(c.num_tokens * c.config.experts.hidden * size_of(c.dtype));
  const double top_k = c.config.router.top_k();
  const auto rate = [us](double bytes) { return us > 0 ? bytes / us * 1e-3 : 0; };
  return {{"pair_us", us},
          {"bw_strict_gbps", rate(2 * (top_k + 1) * row)},
          {"bw_32k_gbps", rate(2 * top_k * row)}};
}

/// Largest difference to the input, relative to max(1, |x|).
double largest_error(const IdentityProblem& problem) {
  if (problem.out == problem.tokens) return 0;
  double largest = 0;
  const std::int64_t size = problem.c.num_tokens * problem.c.config.experts.hidden;
  for (std::int64_t i = 0; i < size; ++i) {
    const double x = load_float(problem.tokens.data(), problem.c.dtype, i);
    const double y = load_float(problem.out.data(), problem.c.dtype, i);
    largest = std::max(largest, std::abs(x - y) / std::max(1.0, std::abs(x)));
  }
  return largest;
}

}  // namespace

CaseResult run_identity_case(const LayerCase& c, const Machine&, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  result.what.experts = "identity";
  const RouterConfig& router = c.config.router;
  const std::int64_t hidden = c.config.experts.hidden;
  LayerConfig config = c.config;
  config.shared = {};
  IdentityProblem problem{
      .c = c,
      .model = synthetic_layer(config, c.router_bias, c.selection_bias, c.dtype, c.seed),
      .tokens = synthetic_tokens(c.num_tokens, hidden, c.dtype, c.seed),
      .routing =
          synthetic_routing(c.num_tokens, router.num_experts, router.top_k(), c.skew, c.seed),
      .out = {}};
  problem.out.resize(problem.tokens.size());
  std::vector<IdentityTimes> ranks(static_cast<std::size_t>(c.num_ranks));
  if (c.num_ranks == 1) {
    run_rank(problem, nullptr, c.num_threads, ranks[0]);
  } else {
    const int threads = std::max(1, c.num_threads / c.num_ranks);
    run_ranks(
        c.num_ranks,
        [&](Communicator& communicator) {
          run_rank(problem, &communicator, threads,
                   ranks[static_cast<std::size_t>(communicator.rank())]);
        },
        c.timeout);
  }
  std::vector<StageTimes> times;
  for (IdentityTimes& rank : ranks) times.push_back(std::move(rank.stages));
  std::vector<StageSamples> stages = merge_ranks(times);
  layer_last(stages);
  result.stages = judge(stages, limits, c.dtype);
  const std::vector<std::int64_t> counts = counts_of(problem.routing, router.num_experts);
  result.load = load_of(counts, counts);
  result.routing_share = 1;
  result.more = pair_figures(c, result, ranks.front().pair_us);
  // Weights 1/K sum to 1 within rounding; 16-bit outputs are rounded once.
  const double bound = c.dtype == DType::kF32 ? 1e-5 : c.dtype == DType::kF16 ? 1e-3 : 4e-3;
  const double error = largest_error(problem);
  result.holds = error <= bound;
  result.verdict = fmt::format("combine(pack(x)) = x within {:.2g} of {:.0e}", error, bound);
  if (c.peer_torch != nullptr && c.options.layout.kind == LayoutKind::kCompact) {
    const ConstRawMatrix x{problem.tokens.data(), c.dtype, c.num_tokens, hidden};
    c.peer_torch->measure({.work = "pack",
                           .c = c,
                           .tokens = x,
                           .routing = problem.routing,
                           .gate = problem.model.gate.floats()},
                          result);
  }
  return result;
}

}  // namespace switchyard::bench
