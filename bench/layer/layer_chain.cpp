// Calls of one layer, each with a routing of its own, in one graph.
#include "bench/layer/layer_chain.hpp"

#include <chrono>

#include "bench/measure/run_clock.hpp"
#include "bench/measure/stage_memory.hpp"

namespace switchyard::bench {

LayerChainResult run_layer_chain(const LayerChainArgs& args) {
  const std::int64_t num_tokens = args.tokens.rows;
  const std::int64_t hidden = args.tokens.cols;
  const std::int64_t top_k = args.model->config.router.top_k();
  LayerOptions options = args.options;
  options.max_tokens = num_tokens;
  MoeLayer layer(*args.model, options);
  StageMemory memory(options.backend);
  const std::int64_t out_bytes = num_tokens * hidden * size_of(DType::kF32);
  const RawMatrix out{memory.make(out_bytes), DType::kF32, num_tokens, hidden};
  const RawMatrix chain_out{memory.make(out_bytes), DType::kF32, num_tokens, hidden};
  std::vector<ForwardArgs> calls;
  const ConstRawMatrix tokens = memory.place(args.tokens);
  for (const SyntheticRouting& routing : args.routings) {
    const Matrix<const std::int32_t> expert{routing.expert.data(), {num_tokens, top_k}};
    const Matrix<const float> weight{routing.weight.data(), {num_tokens, top_k}};
    calls.push_back({.tokens = tokens,
                     .out = chain_out,
                     .expert = memory.place(expert),
                     .weight = memory.place(weight)});
  }
  LayerChainResult result{.out = {}, .stages = {}, .chain_us = {}, .compute = DType::kF32};
  result.compute = layer.compute_dtype();
  StageTimes times;
  const auto clock = make_run_clock(options.backend, times);
  const auto alone = [&](StageRecorder* recorder, void* stream) {
    ForwardArgs call = calls.front();
    call.out = out;
    call.recorder = recorder;
    call.stream = stream;
    layer.forward(call);
  };
  const auto chain = [&](StageRecorder*, void* stream) {
    for (ForwardArgs call : calls) {
      call.stream = stream;
      layer.forward(call);
    }
  };
  RunCounter counter(args.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) {
      times.forget();
      result.chain_us.clear();
    }
    times.start_run();
    const double us = clock->run(&layer, alone);
    times.add("layer", {}, us);
    const double chain_us = clock->run(&calls, chain);
    layer.check();
    result.chain_us.push_back(chain_us / static_cast<double>(calls.size()));
    // The clock runs each twice: by events and as a graph.
    if (run == 0) counter.set_time(std::chrono::duration<double, std::micro>(2 * (us + chain_us)));
  }
  result.out.resize(static_cast<std::size_t>(out_bytes));
  memory.fetch(result.out.data(), out.data, out_bytes);
  result.stages = times.samples();
  layer_last(result.stages);
  return result;
}

}  // namespace switchyard::bench
