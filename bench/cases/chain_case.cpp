// Chain-of-Experts against one pass of as many experts, in turns on the same tokens.
#include <algorithm>
#include <chrono>

#include "bench/cases/cases.hpp"
#include "bench/cases/synthetic.hpp"

namespace switchyard::bench {
namespace {

double median_of(const std::vector<StageFigures>& stages, std::string_view name) {
  for (const StageFigures& figures : stages) {
    if (figures.stage == name) return figures.us.median;
  }
  return 0;
}

/// A layer with stages of its own, and the time of each call.
struct Timed {
  MoeLayer layer;
  StageTimes times{};

  std::chrono::duration<double, std::micro> run(ConstRawMatrix tokens, RawMatrix out) {
    times.start_run();
    const auto start = std::chrono::steady_clock::now();
    layer.forward({.tokens = tokens, .out = out, .recorder = &times});
    const std::chrono::duration<double, std::micro> time(std::chrono::steady_clock::now() - start);
    times.add("layer", {}, time.count());
    return time;
  }
};

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
  Timed chain{.layer = MoeLayer(model, options)};
  Timed once{.layer = MoeLayer(pass, options)};
  const std::int64_t hidden = c.config.experts.hidden;
  const auto x = synthetic_tokens(c.num_tokens, hidden, c.dtype, c.seed);
  const ConstRawMatrix tokens{x.data(), c.dtype, c.num_tokens, hidden};
  std::vector<std::byte> y(x.size());
  const RawMatrix out{y.data(), c.dtype, c.num_tokens, hidden};
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) {
      chain.times.forget();
      once.times.forget();
    }
    const auto time = chain.run(tokens, out) + once.run(tokens, out);
    if (run == 0) counter.set_time(time);
  }
  const DType compute = c.options.compute.value_or(c.dtype);
  const auto figures_of = [&](const Timed& timed) {
    std::vector<StageSamples> samples = timed.times.samples();
    layer_last(samples);
    return judge(samples, limits, compute);
  };
  result.stages = figures_of(chain);
  const std::vector<StageFigures> of_pass = figures_of(once);
  result.what.cold = false;
  const metrics::Routing last = chain.layer.stats();
  result.load = load_of(last.counts, last.counts);
  const double layer_us = median_of(result.stages, "layer");
  const double pass_us = median_of(of_pass, "layer");
  const double plan_us = median_of(of_pass, "plan");
  double experts_us = 0;
  for (const StageFigures& stage : result.stages) {
    if (stage.stage.starts_with("gemm")) experts_us += stage.us.median;
  }
  result.routing_share = std::max(0.0, 1 - experts_us / layer_us);
  result.more = {{"iterations", c.config.router.chain.iterations},
                 {"pass_top_k", router.top_k()},
                 {"pass_us", pass_us},
                 {"pass_plan_us", plan_us},
                 {"chain_over_pass", layer_us / pass_us},
                 {"chain_less_a_plan_over_pass", (layer_us - plan_us) / pass_us},
                 {"rows", {{"used", chain.layer.rows_used()}, {"pass", once.layer.rows_used()}}}};
  return result;
}

}  // namespace switchyard::bench
