// The table of the fused-MoE seed: the layer against a naive loop over the experts.
#include <fmt/core.h>

#include <chrono>

#include "bench/cases/cases.hpp"
#include "bench/cases/naive_experts.hpp"
#include "bench/cases/synthetic.hpp"
#include "bench/layer/layer_chain.hpp"
#include "bench/layer/layer_run.hpp"
#include "bench/peers/torch.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

constexpr double kPublishedShareOutside = 0.05;

struct Problem {
  const LayerCase& c;
  LayerModel model;
  std::vector<std::byte> token_bytes;
  SyntheticRouting routing;

  [[nodiscard]] ConstRawMatrix tokens() const {
    return {token_bytes.data(), DType::kF32, c.num_tokens, c.config.experts.hidden};
  }
  [[nodiscard]] const float* floats() const {
    return reinterpret_cast<const float*>(token_bytes.data());
  }
};

SyntheticRouting make_routing(const LayerCase& c, std::uint64_t seed) {
  const RouterConfig& router = c.config.router;
  return c.published_data
             ? published_routing(c.num_tokens, router.num_experts, router.top_k(), seed)
             : synthetic_routing(c.num_tokens, router.num_experts, router.top_k(), c.skew, seed);
}

Problem make_problem(const LayerCase& c) {
  Problem problem{
      .c = c,
      .model = synthetic_layer(c.config, false, false, DType::kF32, c.seed),
      .token_bytes = synthetic_tokens(c.num_tokens, c.config.experts.hidden, DType::kF32, c.seed),
      .routing = make_routing(c, c.seed)};
  if (c.published_data) {
    problem.model.experts = synthetic_experts(c.config.experts, DType::kF32, c.seed + 13, true);
  }
  return problem;
}

/// Compares, and says so in the verdict behind `times`.
void judge_output(CaseResult& result, const LayerCase& c, const std::string& times,
                  const std::vector<float>& want, const std::vector<std::byte>& out) {
  const std::int64_t outside = count_outside(want, reinterpret_cast<const float*>(out.data()));
  const double allowed =
      c.published_data ? kPublishedShareOutside * static_cast<double>(want.size()) : 0;
  result.holds = static_cast<double>(outside) <= allowed;
  result.verdict = fmt::format(
      "{}, {}", times,
      outside == 0 ? "allclose" : fmt::format("{} of {} elements outside", outside, want.size()));
  result.more["outside"] = outside;
  result.more["data"] = c.published_data ? "published" : "scaled";
}

/// Both with cold weights: the naive loop comes between the layer's runs, each evicts the other.
void run_beside_naive(const Problem& problem, const Machine& machine, CaseResult& result) {
  const LayerCase& c = problem.c;
  NaiveExperts naive(c.config.experts, *problem.model.experts, true);
  std::vector<float> naive_out;
  ThreadPool pool(c.num_threads);
  std::vector<double> naive_us;
  const std::int64_t top_k = c.config.router.top_k();
  const LayerRunResult run = run_layer({
      .model = &problem.model,
      .options = c.options,
      .num_ranks = c.num_ranks,
      .num_threads = c.num_threads,
      .timeout = c.timeout,
      .tokens = problem.tokens(),
      .expert = {problem.routing.expert.data(), {c.num_tokens, top_k}},
      .weight = {problem.routing.weight.data(), {c.num_tokens, top_k}},
      .route_too = false,
      .out = DType::kF32,
      .count = c.count,
      .between =
          [&] {
            const auto start = std::chrono::steady_clock::now();
            naive.run(problem.floats(), c.num_tokens, problem.routing, pool, naive_out);
            const std::chrono::duration<double, std::micro> time =
                std::chrono::steady_clock::now() - start;
            naive_us.push_back(time.count());
          },
  });
  result.stages = judge(run.stages, result.limits, run.compute);
  result.what.cold = naive.bytes() >= static_cast<double>(machine.largest_cache(c.options.backend));
  const double median = statistics(naive_us).median;
  const double ours = result.stages.back().us.median;
  result.peers["naive"] = median;
  result.more["advantage"] = median / ours - 1;
  judge_output(result, c,
               fmt::format("naive {:.0f} us, ours {:.0f} us, naive/ours - 1 = {:.0f}%", median,
                           ours, 100 * (median / ours - 1)),
               naive_out, run.out);
}

/// How often the floor the layer may take.
double target_of(std::int64_t num_tokens) {
  return num_tokens <= 2 ? 1.4 : num_tokens <= 4 ? 1.25 : 1.15;
}

/// On CUDA; the naive loop runs once, on the CPU, to compare with.
void run_chained(const Problem& problem, CaseResult& result) {
  const LayerCase& c = problem.c;
  NaiveExperts naive(c.config.experts, *problem.model.experts, false);
  std::vector<SyntheticRouting> routings{problem.routing};
  double bytes = naive.hit_bytes(problem.routing);
  for (std::uint64_t i = 1; i < kChainLength; ++i) {
    routings.push_back(make_routing(c, c.seed + 100 * i));
    bytes += naive.hit_bytes(routings.back());
  }
  const LayerChainResult run = run_layer_chain({.model = &problem.model,
                                                .options = c.options,
                                                .tokens = problem.tokens(),
                                                .routings = routings,
                                                .count = c.count});
  result.stages = judge(run.stages, result.limits, run.compute);
  const double us = statistics(run.chain_us).median;
  const double floor = bytes / kChainLength / result.limits.read_bandwidth * 1e6;
  const double target = target_of(c.num_tokens);
  result.more["chain_us"] = us;
  result.more["floor_us"] = floor;
  std::vector<float> want;
  ThreadPool pool(c.num_threads);
  naive.run(problem.floats(), c.num_tokens, problem.routing, pool, want);
  judge_output(result, c,
               fmt::format("{:.1f} us a layer in a chain of {}, {:.2f} x the floor of {:.1f} us "
                           "(want {:.2f})",
                           us, kChainLength, us / floor, floor, target),
               want, run.out);
  if (c.bar.empty()) return;
  result.more["bar"] = c.bar;
  result.more["value"] = us / floor;
  result.more["target"] = target;
  result.more["holds"] = result.holds && us / floor <= target;
}

}  // namespace

CaseResult run_fused_moe_case(const LayerCase& c, const Machine& machine, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  result.more = nlohmann::json::object();
  const Problem problem = make_problem(c);
  const std::vector<std::int64_t> counts = counts_of(problem.routing, c.config.router.num_experts);
  result.load = load_of(counts, counts);
  if (c.options.backend == Backend::kCuda) {
    run_chained(problem, result);
  } else {
    run_beside_naive(problem, machine, result);
  }
  if (c.peer_torch != nullptr) {
    c.peer_torch->measure({.work = "naive",
                           .c = c,
                           .tokens = problem.tokens(),
                           .routing = problem.routing,
                           .gate = problem.model.gate.floats()},
                          result);
  }
  return result;
}

}  // namespace switchyard::bench
