// Chain-of-Experts against one pass of as many experts, in turns on the same tokens.
#include <algorithm>
#include <chrono>
#include <memory>

#include "bench/cases/cases.hpp"
#include "bench/cases/synthetic.hpp"
#include "bench/measure/run_clock.hpp"
#include "bench/measure/stage_memory.hpp"

namespace switchyard::bench {
namespace {

double median_of(const std::vector<StageFigures>& stages, std::string_view name) {
  for (const StageFigures& figures : stages) {
    if (figures.stage == name) return figures.us.median;
  }
  return 0;
}

/// A layer with stages of its own, and the time of each call.
class Timed {
 public:
  Timed(const LayerModel& model, const LayerOptions& options)
      : layer_(model, options), clock_(make_run_clock(options.backend, times_)) {}

  std::chrono::duration<double, std::micro> run(ConstRawMatrix tokens, RawMatrix out) {
    times_.start_run();
    const double us = clock_->run(this, [&](StageRecorder* recorder, void* stream) {
      layer_.forward({.tokens = tokens, .out = out, .recorder = recorder, .stream = stream});
    });
    layer_.check();
    times_.add("layer", {}, us);
    return std::chrono::duration<double, std::micro>(us);
  }
  void forget() { times_.forget(); }
  [[nodiscard]] MoeLayer& layer() { return layer_; }
  [[nodiscard]] std::vector<StageFigures> figures(const Limits& limits, DType compute) const {
    std::vector<StageSamples> samples = times_.samples();
    layer_last(samples);
    return judge(samples, limits, compute);
  }

 private:
  MoeLayer layer_;
  StageTimes times_;
  std::unique_ptr<RunClock> clock_;
};

/// Bar L5: two iterations of half the experts, on a GPU.
void add_bar(const LayerCase& c, double ratio, CaseResult& result) {
  constexpr double kTarget = 1.10;
  if (c.options.backend != Backend::kCuda || c.config.router.chain.iterations != 2) return;
  result.more["bar"] = "L5";
  result.more["value"] = ratio;
  result.more["target"] = kTarget;
  result.more["holds"] = ratio <= kTarget;
}

}  // namespace

CaseResult run_chain_case(const LayerCase& c, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  const LayerModel model = synthetic_layer(c.config, false, false, c.dtype, c.seed);
  LayerModel pass = model;
  RouterConfig router = c.config.router;
  router.chain = {};
  router.as_top_k().top_k *= c.config.router.chain.iterations;
  use_router(pass, router);
  LayerOptions options = c.options;
  options.num_threads = c.num_threads;
  options.max_tokens = c.num_tokens;
  Timed chain(model, options);
  Timed once(pass, options);
  const std::int64_t hidden = c.config.experts.hidden;
  const auto x = synthetic_tokens(c.num_tokens, hidden, c.dtype, c.seed);
  StageMemory memory(options.backend);
  const ConstRawMatrix tokens = memory.place({x.data(), c.dtype, c.num_tokens, hidden});
  const RawMatrix out{memory.make(std::ssize(x)), c.dtype, c.num_tokens, hidden};
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) {
      chain.forget();
      once.forget();
    }
    const auto time = chain.run(tokens, out) + once.run(tokens, out);
    if (run == 0) counter.set_time(time);
  }
  const DType compute = c.options.compute.value_or(c.dtype);
  result.stages = chain.figures(limits, compute);
  const std::vector<StageFigures> of_pass = once.figures(limits, compute);
  result.what.cold = options.backend == Backend::kCuda;
  const metrics::Routing last = chain.layer().stats();
  result.load = load_of(last.counts, last.counts);
  const double layer_us = median_of(result.stages, "layer");
  const double pass_us = median_of(of_pass, "layer");
  const double plan_us = median_of(of_pass, "plan");
  double experts_us = 0;
  for (const StageFigures& stage : result.stages) {
    if (stage.stage.starts_with("gemm")) experts_us += stage.us.median;
  }
  result.routing_share = std::max(0.0, 1 - experts_us / layer_us);
  result.more = {
      {"iterations", c.config.router.chain.iterations},
      {"pass_top_k", router.top_k()},
      {"pass_us", pass_us},
      {"pass_plan_us", plan_us},
      {"chain_over_pass", layer_us / pass_us},
      {"chain_less_a_plan_over_pass", (layer_us - plan_us) / pass_us},
      {"rows", {{"used", chain.layer().rows_used()}, {"pass", once.layer().rows_used()}}}};
  add_bar(c, (layer_us - plan_us) / pass_us, result);
  return result;
}

}  // namespace switchyard::bench
