// The router alone.
#include <chrono>

#include "bench/cases.hpp"
#include "bench/router_alone.hpp"
#include "bench/synthetic.hpp"

namespace switchyard::bench {

CaseResult run_router_case(const LayerCase& c, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  const LayerModel model =
      synthetic_layer(c.config, c.router_bias, c.selection_bias, c.dtype, c.seed);
  const auto tokens = synthetic_tokens(c.num_tokens, c.config.experts.hidden, c.dtype, c.seed);
  StageTimes times;
  RouterAlone router(model, {tokens.data(), c.dtype, c.num_tokens, c.config.experts.hidden}, times,
                     c.num_threads);
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) times.forget();
    times.start_run();
    const auto start = std::chrono::steady_clock::now();
    router.run();
    if (run == 0) counter.set_time(std::chrono::steady_clock::now() - start);
  }
  result.stages = judge(times.samples(), limits, c.dtype);
  result.routing_share = 1;
  return result;
}

}  // namespace switchyard::bench
