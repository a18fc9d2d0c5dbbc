// Soft-MoE, stage by stage, in turns with the combine of a top-k routing.
#include <algorithm>
#include <chrono>

#include "bench/cases/cases.hpp"
#include "bench/cases/synthetic.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

/// Rows of experts by a top-k routing, on their way back to the tokens.
class TopKCombine {
 public:
  TopKCombine(const LayerCase& c, ThreadPool& pool)
      : hidden_(c.config.experts.hidden), num_experts_(c.config.router.num_experts), pool_(pool) {
    const std::int64_t top_k = c.config.router.top_k();
    const SyntheticRouting routing = synthetic_routing(
        c.num_tokens, num_experts_, static_cast<std::int32_t>(top_k), c.skew, c.seed);
    const DenseAssignments assignments{.expert = {routing.expert.data(), {c.num_tokens, top_k}},
                                       .weight = {routing.weight.data(), {c.num_tokens, top_k}}};
    plan({.assignments = assignments, .plan = plan_.reserve(assignments, {}, num_experts_, 0)});
    rows_ = synthetic_tokens(c.num_tokens * top_k, hidden_, DType::kF32, c.seed);
  }

  void run(RawMatrix out, StageRecorder* recorder) const {
    const Execution execution{.pool = &pool_, .recorder = recorder};
    const std::int64_t num_rows = plan_.view().expert_begin[num_experts_];
    const ScopedStage stage(
        execution, "combine",
        {.bytes = static_cast<double>(4 * num_rows * hidden_ + 12 * num_rows + out.bytes()),
         .flops = 2 * static_cast<double>(num_rows * hidden_),
         .flops_executed = 2 * static_cast<double>(num_rows * hidden_)});
    combine({.rows = {rows_.data(), DType::kF32, num_rows, hidden_},
             .plan = plan_.view(),
             .reduced = {.sums = out, .subtree = {.order = {.num_experts = num_experts_}}},
             .execution = {.pool = &pool_}});
  }

 private:
  std::int64_t hidden_;
  std::int32_t num_experts_;
  ThreadPool& pool_;
  Plan plan_;
  std::vector<std::byte> rows_;
};

double median_of(const std::vector<StageFigures>& stages, std::string_view name) {
  for (const StageFigures& figures : stages) {
    if (figures.stage == name) return figures.us.median;
  }
  return 0;
}

}  // namespace

CaseResult run_soft_moe_case(const LayerCase& c, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  const ExpertConfig& experts = c.config.experts;
  ThreadPool pool(c.num_threads);
  const DType dtype = c.options.compute.value_or(c.dtype);
  const auto source = synthetic_experts(experts, dtype, c.seed);
  const auto weights = load_experts({.config = experts,
                                     .source = source.get(),
                                     .dtype = dtype,
                                     .num_local = experts.num_experts,
                                     .execution = {.pool = &pool}});
  const std::int64_t hidden = experts.hidden;
  const std::int64_t slots = experts.num_experts * c.mixing.slots;
  const auto x = synthetic_tokens(c.num_tokens, hidden, dtype, c.seed);
  const auto phi = synthetic_tokens(slots, hidden, DType::kF32, c.seed + 1);
  std::vector<std::byte> y(x.size());
  const RawMatrix out{y.data(), dtype, c.num_tokens, hidden};
  const TopKCombine beside(c, pool);

  StageTimes times;
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) times.forget();
    times.start_run();
    const auto start = std::chrono::steady_clock::now();
    soft_moe({.x = {x.data(), dtype, c.num_tokens, hidden},
              .phi = {phi.data(), DType::kF32, slots, hidden},
              .weights = weights.get(),
              .config = c.mixing,
              .out = out,
              .execution = {.pool = &pool, .recorder = &times}});
    const std::chrono::duration<double, std::micro> time(std::chrono::steady_clock::now() - start);
    times.add("layer", {}, time.count());
    beside.run(out, &times);
    if (run == 0) counter.set_time(time);
  }
  std::vector<StageSamples> samples = times.samples();
  // The combine is not the layer's: it stands behind it.
  std::stable_partition(samples.begin(), samples.end(),
                        [](const StageSamples& stage) { return stage.stage != "combine"; });
  const StageSamples combine = samples.back();
  samples.pop_back();
  layer_last(samples);
  samples.push_back(combine);
  result.stages = judge(samples, limits, dtype);
  result.what.cold = false;
  const std::vector<std::int64_t> rows(static_cast<std::size_t>(experts.num_experts),
                                       c.mixing.slots * c.num_tokens / c.mixing.group);
  result.load = load_of(rows, rows);
  const double products =
      median_of(result.stages, "gemm1+activation") + median_of(result.stages, "gemm2");
  result.routing_share = 1 - products / median_of(result.stages, "layer");
  result.more = {{"slots", c.mixing.slots},
                 {"group", c.mixing.group},
                 {"causal", c.mixing.causal},
                 {"write_back_over_combine",
                  median_of(result.stages, "soft_combine") / median_of(result.stages, "combine")}};
  return result;
}

}  // namespace switchyard::bench
