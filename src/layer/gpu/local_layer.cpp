// The layer on one GPU. Tokens, output and routing may also lie in host memory: then they are
// copied and the call waits for its result.
#include "layer/gpu/local_layer.hpp"

#include <algorithm>

#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/saved_memory.hpp"
#include "layer/gpu/backward/arguments.hpp"
#include "layer/gpu/wire_rows.hpp"
#include "layer/saved_losses.hpp"

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
  SavedForward::State* const saved = args.saved == nullptr ? nullptr : &begin_saving(args);
  const ConstRawMatrix given = args.on_device ? args.tokens : to_device(args.tokens);
  const ConstRawMatrix tokens =
      saved == nullptr ? stages_.to_compute(given) : stages_.keep(given, args, *saved);
  const bool host_out = num_tokens > 0 && !args.on_device && !is_on_device(args.out.data);
  const RawMatrix out =
      host_out ? host_out_.matrix(args.out.dtype, num_tokens, args.out.cols) : args.out;

  stages_.router().run(args, tokens, stages_.execution(), saved);
  if (saved != nullptr) save_losses(config.router, options_.losses, stages_.execution(), *saved);
  run_experts(stages_.to_experts(tokens, stages_.run_shared(tokens, saved)), out, saved);
  if (saved != nullptr) saved->use = SavedForward::State::Use::kReady;

  if (host_out) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(args.out.data, out.data, static_cast<std::size_t>(out.bytes()),
                                    cudaMemcpyDeviceToHost, stages_.stream()));
  }
  if (args.request.record != nullptr) {
    stages_.router().download(*args.request.record, stages_.stream(), nullptr);
  }
  if (host_out || args.request.record != nullptr) check();
}

SavedForward::State& LocalLayer::begin_saving(const ForwardArgs& args) {
  (void)weights();  // a reload may have failed
  SavedForward::State& saved = args.saved->state();
  (void)SavedOnDevice<SavedMemory>::prepare(saved.memory, stages_.stream());
  saved.begin(number_, reloads_);
  backward_.reserve(std::max(args.tokens.rows, options_.max_tokens), saved.recompute, stages_);
  return saved;
}

void LocalLayer::backward(const BackwardArgs& args) {
  SavedForward::State& saved = args.saved->state();
  saved.require_of(number_, reloads_);
  stages_.raise_status();
  if (saved.num_tokens > 0) require_on_device(args, true);
  stages_.begin(static_cast<cudaStream_t>(args.stream), args.recorder);
  saved.use = SavedForward::State::Use::kUsed;
  TokensForExperts input = stages_.to_experts(saved);
  input.x = crossed(input.x);
  backward_.run(args, saved, input, options_.losses, stages_);
}

void LocalLayer::reload_experts() {
  ++reloads_;
  stages_.reload_experts();
}

void LocalLayer::check() {
  SWITCHYARD_CUDA(cudaStreamSynchronize(stages_.stream()));
  stages_.raise_status();
  rows_used = rows_executed = 0;
  for (std::int32_t i = 0; i < stages_.num_iterations(); ++i) {
    rows_used += stages_.told(i).rows_used;
    rows_executed += stages_.told(i).rows_executed;
  }
}

void LocalLayer::reserve(std::int64_t num_tokens) {
  stages_.reserve(num_tokens);
  if (stages_.adds_to_sums() || stages_.each_group()) {
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

void LocalLayer::run_experts(const TokensForExperts& input, RawMatrix out,
                             SavedForward::State* saved) {
  CudaExperts& experts = stages_.experts();
  const ConstRawMatrix tokens = input.x;
  const RowAssignments work{.expert = input.routing.expert,
                            .weight = input.routing.weight,
                            .kept = stages_.router().kept(),
                            .total_experts = config.router.num_experts};
  const bool direct = input.around.data == nullptr && !stages_.each_group();
  const RawMatrix sums =
      direct ? out : sums_.matrix(sums_type(), stages_.rows_of_sums(tokens.rows), tokens.cols);
  const ReducedRows reduced{.sums = sums, .each_group = stages_.each_group()};
  // What becomes e4m3 is that also where it travels as something of its own.
  const bool fp8 = experts.takes_fp8(work, tokens.rows, tokens, reduced, stages_.execution());
  const bool travels = !fp8 || options_.dispatch_wire != DType::kF8E4M3;
  const ConstRawMatrix x = travels ? crossed(tokens) : tokens;
  const bool keeps = saved != nullptr && saved->recompute == Recompute::kNone;
  const bool reported =
      !keeps && !fp8 &&
      experts.plan_and_reduce(work, tokens.rows, x, reduced, stages_.place_of_report(),
                              stages_.recorded(), stages_.execution());
  if (!reported) {
    experts.make_plan(work, tokens.rows, stages_.execution());
    RawMatrix preactivation{};
    if (keeps) {
      preactivation = saved->preactivation =
          saved->room(SavedMemory::kPreactivation, compute, experts.plan().row_token.shape[0],
                      experts.preactivation_cols());
    }
    experts.reduce(fp8 ? stages_.quantised(x) : RowsForExperts{.x = x}, reduced,
                   stages_.execution(), preactivation);
  }
  if (!direct) {
    const ScopedStage stage(stages_.execution(), "combine",
                            {.bytes = static_cast<double>(sums.bytes() + out.bytes())});
    finish({.partials = sums,
            .groups_per_row = stages_.groups_per_row(),
            .shared = input.around,
            .out = out,
            .execution = stages_.execution()});
  }
  if (reported) return;
  const PlanView& view = experts.plan();
  stages_.report(view.token_begin.data + view.num_tokens(), nullptr, 0);
}

}  // namespace switchyard
