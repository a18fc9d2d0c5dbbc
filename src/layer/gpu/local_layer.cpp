// The layer on one GPU. Tokens, output and routing may also lie in host memory: then they are
// copied and the call waits for its result.
#include "layer/gpu/local_layer.hpp"

#include "core/gpu/cuda_memory.hpp"
#include "layer/gpu/wire_rows.hpp"

namespace switchyard {

LocalLayer::LocalLayer(const LayerModel& model, const LayerOptions& options)
    : options_(options), stages_(model, options, 0, 1) {
  config = model.config;
  compute = stages_.compute();
  if (options.max_tokens > 0) reserve(options.max_tokens);
}

void LocalLayer::forward(const ForwardArgs& args) {
  stages_.raise_status();
  stages_.begin(static_cast<cudaStream_t>(args.stream), args.recorder);
  const std::int64_t num_tokens = args.tokens.rows;
  reserve(num_tokens);
  const ConstRawMatrix tokens = stages_.to_compute(to_device(args.tokens));
  const bool host_out = num_tokens > 0 && !is_on_device(args.out.data);
  const RawMatrix out =
      host_out ? host_out_.matrix(args.out.dtype, num_tokens, args.out.cols) : args.out;

  stages_.router().run(args, tokens, stages_.execution());
  const Matrix<const float> shared = stages_.run_shared(tokens);
  run_experts(tokens, shared, out);

  if (host_out) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(args.out.data, out.data, static_cast<std::size_t>(out.bytes()),
                                    cudaMemcpyDeviceToHost, stages_.stream()));
  }
  if (args.request.record != nullptr) {
    stages_.router().download(*args.request.record, stages_.stream(), nullptr);
  }
  if (host_out || args.request.record != nullptr) check();
}

void LocalLayer::check() {
  SWITCHYARD_CUDA(cudaStreamSynchronize(stages_.stream()));
  stages_.raise_status();
  rows_used = stages_.told().rows_used;
  rows_executed = stages_.told().rows_executed;
}

void LocalLayer::reserve(std::int64_t num_tokens) {
  stages_.reserve(num_tokens);
  if (stages_.has_shared() || stages_.each_group()) {
    (void)sums_.matrix(sums_type(), stages_.rows_of_sums(num_tokens), config.experts.hidden);
  }
}

/// As over ranks: the bits may not depend on their number.
DType LocalLayer::sums_type() const {
  return stages_.each_group() ? options_.combine_wire : DType::kF32;
}

ConstRawMatrix LocalLayer::to_device(ConstRawMatrix tokens) {
  if (tokens.rows == 0 || is_on_device(tokens.data)) return tokens;
  const RawMatrix copy = host_tokens_.matrix(tokens.dtype, tokens.rows, tokens.cols);
  SWITCHYARD_CUDA(cudaMemcpyAsync(copy.data, tokens.data, static_cast<std::size_t>(copy.bytes()),
                                  cudaMemcpyHostToDevice, stages_.stream()));
  return copy;
}

ConstRawMatrix LocalLayer::crossed(ConstRawMatrix tokens) {
  if (!stages_.crosses()) return tokens;
  const RawMatrix out = stages_.crossed(tokens.rows, tokens.cols);
  const ScopedStage stage(stages_.execution(), "dequantize",
                          {.bytes = 2 * static_cast<double>(tokens.bytes())});
  cross_wire(tokens, *options_.dispatch_wire, out, stages_.stream());
  return out;
}

void LocalLayer::run_experts(ConstRawMatrix tokens, Matrix<const float> shared, RawMatrix out) {
  CudaExperts& experts = stages_.experts();
  const Routing& routing = stages_.router().routing();
  const RowAssignments work{.expert = routing.expert,
                            .weight = routing.weight,
                            .kept = stages_.router().kept(),
                            .total_experts = config.router.num_experts};
  const bool direct = shared.data == nullptr && !stages_.each_group();
  const RawMatrix sums =
      direct ? out : sums_.matrix(sums_type(), stages_.rows_of_sums(tokens.rows), tokens.cols);
  const ReducedRows reduced{.sums = sums, .each_group = stages_.each_group()};
  const ConstRawMatrix x = crossed(tokens);
  const bool reported =
      experts.plan_and_reduce(work, tokens.rows, x, reduced, stages_.place_of_report(),
                              stages_.recorded(), stages_.execution());
  if (!reported) {
    experts.make_plan(work, tokens.rows, stages_.execution());
    experts.reduce(x, reduced, stages_.execution());
  }
  if (!direct) {
    const ScopedStage stage(stages_.execution(), "combine",
                            {.bytes = static_cast<double>(sums.bytes() + out.bytes())});
    finish({.partials = sums,
            .groups_per_row = stages_.groups_per_row(),
            .shared = shared,
            .out = out,
            .execution = stages_.execution()});
  }
  if (reported) return;
  const PlanView& view = experts.plan();
  stages_.report(view.token_begin.data + view.num_tokens(), nullptr, 0);
}

}  // namespace switchyard
