// The router alone.
#include <chrono>

#include "bench/cases/cases.hpp"
#include "bench/cases/synthetic.hpp"
#include "bench/layer/router_alone.hpp"
#include "bench/measure/run_clock.hpp"
#include "bench/measure/stage_memory.hpp"
#include "bench/peers/torch.hpp"

namespace switchyard::bench {

CaseResult run_router_case(const LayerCase& c, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  const LayerModel model =
      synthetic_layer(c.config, c.router_bias, c.selection_bias, c.dtype, c.seed);
  const auto tokens = synthetic_tokens(c.num_tokens, c.config.experts.hidden, c.dtype, c.seed);
  const std::vector<std::int32_t> token_ids = synthetic_token_ids(c.num_tokens, c.seed);
  const Backend backend = c.options.backend;
  StageMemory memory(backend);
  StageTimes times;
  RouterAlone router(model,
                     memory.place({tokens.data(), c.dtype, c.num_tokens, c.config.experts.hidden}),
                     backend, c.num_threads,
                     {.token_ids = {token_ids.data(), {c.num_tokens}},
                      .seed = c.seed,
                      .training = !c.router.empty()});
  const auto clock = make_run_clock(backend, times);
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) times.forget();
    times.start_run();
    const std::chrono::duration<double, std::micro> time(clock->run(
        &router, [&](StageRecorder* recorder, void* stream) { router.run(recorder, stream); }));
    if (run == 0) counter.set_time(time);
  }
  result.stages = judge(times.samples(), limits, c.dtype);
  result.routing_share = 1;
  if (c.peer_torch != nullptr) {
    const SyntheticRouting routing = synthetic_routing(c.num_tokens, c.config.router.num_experts,
                                                       c.config.router.top_k(), c.skew, c.seed);
    const ConstRawMatrix x{tokens.data(), c.dtype, c.num_tokens, c.config.experts.hidden};
    c.peer_torch->measure(
        {.work = "select", .c = c, .tokens = x, .routing = routing, .gate = model.gate.floats()},
        result);
  }
  return result;
}

}  // namespace switchyard::bench
