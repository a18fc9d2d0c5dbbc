// Soft-MoE, stage by stage, in turns with the combine of a top-k routing.
#include <algorithm>

#include "bench/cases/cases.hpp"
#include "bench/cases/synthetic.hpp"
#include "bench/measure/run_clock.hpp"
#include "bench/measure/stage_memory.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

/// Rows of experts by a top-k routing, on their way back to the tokens: f32 on a CPU, the compute
/// type on a GPU.
class TopKCombine {
 public:
  TopKCombine(const LayerCase& c, DType dtype, ThreadPool& pool, StageMemory& memory)
      : num_experts_(c.config.router.num_experts),
        execution_{.backend = c.options.backend, .pool = &pool} {
    const std::int64_t top_k = c.config.router.top_k();
    const std::int64_t hidden = c.config.experts.hidden;
    const SyntheticRouting routing = synthetic_routing(
        c.num_tokens, num_experts_, static_cast<std::int32_t>(top_k), c.skew, c.seed);
    const DenseAssignments assignments{.expert = {routing.expert.data(), {c.num_tokens, top_k}},
                                       .weight = {routing.weight.data(), {c.num_tokens, top_k}}};
    plan_ = host_plan_.reserve(assignments, {}, num_experts_, 0);
    plan({.assignments = assignments, .plan = plan_});
    const std::int64_t num_rows = plan_.expert_begin[num_experts_];
    const DType of_rows = execution_.backend == Backend::kCpu ? DType::kF32 : dtype;
    host_rows_ = synthetic_tokens(c.num_tokens * top_k, hidden, of_rows, c.seed);
    rows_ = memory.place({host_rows_.data(), of_rows, num_rows, hidden});
    if (execution_.backend != Backend::kCpu) place_plan(memory);
  }

  void run(RawMatrix out, StageRecorder* recorder, void* stream) {
    execution_.recorder = recorder;
    execution_.stream = stream;
    const auto products = 2 * static_cast<double>(rows_.rows * rows_.cols);
    const ScopedStage stage(
        execution_, "combine",
        {.bytes = static_cast<double>(rows_.bytes() + 12 * rows_.rows + out.bytes()),
         .flops = products,
         .flops_executed = products});
    Execution within = execution_;
    within.recorder = nullptr;
    combine({.rows = rows_,
             .plan = plan_,
             .reduced = {.sums = out, .subtree = {.order = {.num_experts = num_experts_}}},
             .execution = within});
  }

 private:
  void place_plan(StageMemory& memory) {
    const auto placed = [&]<typename T>(Vector<T>& array) {
      const Vector<const T> copy = memory.place(Vector<const T>(array));
      array.data = const_cast<T*>(copy.data);  // only read from here on
    };
    placed(plan_.expert_begin), placed(plan_.expert_rows), placed(plan_.row_token);
    placed(plan_.row_weight), placed(plan_.token_begin), placed(plan_.token_row);
  }

  std::int32_t num_experts_;
  Execution execution_;
  Plan host_plan_;
  PlanView plan_;
  std::vector<std::byte> host_rows_;
  ConstRawMatrix rows_;
};

/// Soft-MoE on memory of its backend. On a GPU phi has the compute type, as a router's gate there.
class Mixing {
 public:
  Mixing(const LayerCase& c, DType dtype, ThreadPool& pool, StageMemory& memory)
      : config_(c.mixing),
        execution_{.backend = c.options.backend, .pool = &pool},
        source_(synthetic_experts(c.config.experts, dtype, c.seed)),
        weights_(load_experts({.config = c.config.experts,
                               .source = source_.get(),
                               .dtype = dtype,
                               .num_local = c.config.experts.num_experts,
                               .execution = execution_})) {
    const std::int64_t hidden = c.config.experts.hidden;
    const std::int64_t slots = c.config.experts.num_experts * c.mixing.slots;
    const DType of_phi = execution_.backend == Backend::kCpu ? DType::kF32 : dtype;
    host_x_ = synthetic_tokens(c.num_tokens, hidden, dtype, c.seed);
    host_phi_ = synthetic_tokens(slots, hidden, of_phi, c.seed + 1);
    x_ = memory.place({host_x_.data(), dtype, c.num_tokens, hidden});
    phi_ = memory.place({host_phi_.data(), of_phi, slots, hidden});
    execution_.workspace_bytes = soft_moe_workspace_bytes(*weights_, config_, c.num_tokens);
    if (execution_.workspace_bytes > 0) {
      execution_.workspace = memory.make(execution_.workspace_bytes);
    }
  }

  void run(RawMatrix out, StageRecorder* recorder, void* stream) {
    execution_.recorder = recorder;
    execution_.stream = stream;
    soft_moe({.x = x_,
              .phi = phi_,
              .weights = weights_.get(),
              .config = config_,
              .out = out,
              .execution = execution_});
  }

 private:
  SoftMoeConfig config_;
  Execution execution_;
  std::shared_ptr<const ExpertSource> source_;
  std::unique_ptr<ExpertWeights> weights_;
  std::vector<std::byte> host_x_, host_phi_;
  ConstRawMatrix x_, phi_;
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
  StageMemory memory(c.options.backend);
  Mixing mixing(c, dtype, pool, memory);
  TopKCombine beside(c, dtype, pool, memory);
  RawMatrix out{nullptr, dtype, c.num_tokens, experts.hidden};
  out.data = memory.make(out.bytes());

  StageTimes times;
  const auto clock = make_run_clock(c.options.backend, times);
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) times.forget();
    times.start_run();
    const std::chrono::duration<double, std::micro> time(clock->run(
        &mixing,
        [&](StageRecorder* recorder, void* stream) { mixing.run(out, recorder, stream); }));
    times.add("layer", {}, time.count());
    (void)clock->run(
        &beside, [&](StageRecorder* recorder, void* stream) { beside.run(out, recorder, stream); });
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
  const auto layer = std::find_if(result.stages.begin(), result.stages.end(),
                                  [](const StageFigures& f) { return f.stage == "layer"; });
  result.more = {{"slots", c.mixing.slots},
                 {"group", c.mixing.group},
                 {"causal", c.mixing.causal},
                 {"write_back_over_combine",
                  median_of(result.stages, "soft_combine") / median_of(result.stages, "combine")},
                 {"layer_over_limit", layer->us.median / layer->limit_us}};
  if (c.bar.empty()) return result;
  constexpr double kTarget = 1.15;
  result.more["bar"] = c.bar;
  result.more["value"] = layer->us.median / layer->limit_us;
  result.more["target"] = kTarget;
  result.more["holds"] = layer->us.median <= kTarget * layer->limit_us;
  return result;
}

}  // namespace switchyard::bench
