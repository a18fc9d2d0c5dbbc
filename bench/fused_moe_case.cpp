// The table of the fused-MoE seed: the layer against a naive loop over the experts.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/cases.hpp"
#include "bench/layer_run.hpp"
#include "bench/synthetic.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

/// Sixteen partial sums, so that a compiler may use vectors.
float dot(const float* a, const float* b, std::int64_t size) {
  constexpr std::int64_t kLanes = 16;
  float sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  float sum = 0;
  for (const float partial : sums) sum += partial;
  for (; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

struct Naive {
  const LayerCase& c;
  std::vector<float> w13;  ///< [E, 2I, H].
  std::vector<float> w2;   ///< [E, H, I].

  /// One expert after the other, one of its tokens after the other.
  void run(const float* tokens, const SyntheticRouting& routing, ThreadPool& pool,
           std::vector<float>& out) const {
    const std::int64_t hidden = c.config.experts.hidden;
    const std::int64_t inner = c.config.experts.inner;
    const std::int64_t top_k = c.config.router.top_k;
    std::fill(out.begin(), out.end(), 0.0F);
    std::vector<float> middle(static_cast<std::size_t>(inner));
    for (std::int32_t e = 0; e < c.config.router.num_experts; ++e) {
      const float* gate = w13.data() + e * 2 * inner * hidden;
      const float* up = gate + inner * hidden;
      const float* down = w2.data() + e * hidden * inner;
      for (std::int64_t i = 0; i < c.num_tokens * top_k; ++i) {
        if (routing.expert[static_cast<std::size_t>(i)] != e) continue;
        const float* x = tokens + i / top_k * hidden;
        const float weight = routing.weight[static_cast<std::size_t>(i)];
        float* y = out.data() + i / top_k * hidden;
        pool.parallel_for((inner + 63) / 64, [&](std::int64_t block, int) {
          for (std::int64_t j = block * 64; j < std::min(inner, block * 64 + 64); ++j) {
            const float g = dot(gate + j * hidden, x, hidden);
            middle[static_cast<std::size_t>(j)] =
                g / (1.0F + std::exp(-g)) * dot(up + j * hidden, x, hidden);
          }
        });
        pool.parallel_for((hidden + 63) / 64, [&](std::int64_t block, int) {
          for (std::int64_t h = block * 64; h < std::min(hidden, block * 64 + 64); ++h) {
            y[h] += weight * dot(down + h * inner, middle.data(), inner);
          }
        });
      }
    }
  }
};

Naive make_naive(const LayerCase& c, const ExpertSource& source) {
  const auto num_experts = static_cast<std::size_t>(c.config.router.num_experts);
  const std::int64_t hidden = c.config.experts.hidden;
  const std::int64_t inner = c.config.experts.inner;
  const auto matrix = static_cast<std::size_t>(hidden * inner);
  Naive naive{.c = c, .w13 = {}, .w2 = {}};
  naive.w13.resize(2 * num_experts * matrix);
  naive.w2.resize(num_experts * matrix);
  for (std::size_t e = 0; e < num_experts; ++e) {
    const auto expert = static_cast<std::int32_t>(e);
    float* gate = naive.w13.data() + 2 * e * matrix;
    source.read(expert, ExpertPart::kGate, 0, inner, DType::kF32, gate);
    source.read(expert, ExpertPart::kUp, 0, inner, DType::kF32, gate + matrix);
    source.read(expert, ExpertPart::kDown, 0, hidden, DType::kF32, naive.w2.data() + e * matrix);
  }
  return naive;
}

/// Elements outside of atol 1e-5 + rtol 1e-3 * |naive|.
std::int64_t count_outside(const std::vector<float>& naive, const float* ours) {
  std::int64_t outside = 0;
  for (std::size_t i = 0; i < naive.size(); ++i) {
    const bool close = std::abs(ours[i] - naive[i]) <= 1e-5F + 1e-3F * std::abs(naive[i]);
    outside += close ? 0 : 1;  // a NaN is not close
  }
  return outside;
}

}  // namespace

CaseResult run_fused_moe_case(const LayerCase& c, const Machine& machine, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  const LayerModel model = synthetic_layer(c.config, false, false, DType::kF32, c.seed);
  const auto bytes = synthetic_tokens(c.num_tokens, c.config.experts.hidden, DType::kF32, c.seed);
  const auto* tokens = reinterpret_cast<const float*>(bytes.data());
  const RouterConfig& router = c.config.router;
  const SyntheticRouting routing =
      synthetic_routing(c.num_tokens, router.num_experts, router.top_k, c.skew, c.seed);

  // Cold weights for both, so the naive loop comes between the layer's runs: each evicts the other.
  const Naive naive = make_naive(c, *model.experts);
  std::vector<float> naive_out(static_cast<std::size_t>(c.num_tokens * c.config.experts.hidden));
  ThreadPool pool(c.num_threads);
  std::vector<double> naive_us;
  const LayerRunResult run = run_layer({
      .model = &model,
      .options = c.options,
      .num_ranks = c.num_ranks,
      .num_threads = c.num_threads,
      .timeout = c.timeout,
      .tokens = {bytes.data(), DType::kF32, c.num_tokens, c.config.experts.hidden},
      .expert = {routing.expert.data(), {c.num_tokens, router.top_k}},
      .weight = {routing.weight.data(), {c.num_tokens, router.top_k}},
      .route_too = false,
      .out = DType::kF32,
      .count = c.count,
      .between =
          [&] {
            const auto start = std::chrono::steady_clock::now();
            naive.run(tokens, routing, pool, naive_out);
            const std::chrono::duration<double, std::micro> time =
                std::chrono::steady_clock::now() - start;
            naive_us.push_back(time.count());
          },
  });
  result.stages = judge(run.stages, limits, run.compute);
  result.load = load_of(run.record.counts, run.record.counts_kept);
  const double weight_bytes = static_cast<double>((naive.w13.size() + naive.w2.size()) * 4);
  result.what.cold = weight_bytes >= static_cast<double>(machine.largest_cache(c.options.backend));
  const double median = statistics(naive_us).median;
  const double ours = result.stages.back().us.median;
  const std::int64_t outside =
      count_outside(naive_out, reinterpret_cast<const float*>(run.out.data()));
  result.holds = outside == 0;
  result.verdict =
      fmt::format("naive {:.0f} us, ours {:.0f} us, naive/ours - 1 = {:.0f}%, {}", median, ours,
                  100 * (median / ours - 1),
                  outside == 0 ? "allclose" : fmt::format("{} elements outside", outside));
  result.peers["naive"] = median;
  result.more = {{"advantage", median / ours - 1}, {"outside", outside}};
  return result;
}

}  // namespace switchyard::bench
