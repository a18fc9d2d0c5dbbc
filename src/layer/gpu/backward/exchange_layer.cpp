// The way back of a layer over ranks on GPUs: what its forward keeps, and in which memory. All of
// that is made for max_tokens while no rank's kernels run, for making it may wait for the device.
#include "layer/gpu/exchange_layer.hpp"

#include <array>

#include "layer/gpu/backward/arguments.hpp"
#include "layer/gpu/backward/kernels.hpp"
#include "layer/gpu/wire_rows.hpp"
#include "layer/saved_losses.hpp"

namespace switchyard {

SavedForward::State& ExchangeLayer::begin_saving(const ForwardArgs& args) {
  (void)weights();  // a reload may have failed
  SavedForward::State& saved = args.saved->state();
  DeviceSavedMemory& memory = DeviceSavedMemory::prepare(saved.memory, stages_.stream());
  bool has_room = gradients_ != nullptr && room_recoveries_ == communicator_.recoveries() &&
                  backward_.is_reserved(options_.max_tokens, saved.recompute);
  for (const SavedPiece& piece : pieces_of(saved.recompute)) {
    has_room = has_room && memory.has(piece.part, piece.bytes);
  }
  if (!has_room) make_room(saved.recompute, memory);
  saved.begin(number_, reloads_);
  return saved;
}

std::array<ExchangeLayer::SavedPiece, 13> ExchangeLayer::pieces_of(Recompute recompute) {
  const CudaExperts& experts = stages_.experts();
  const std::int64_t tokens = options_.max_tokens;
  const std::int64_t hidden = config.experts.hidden;
  const std::int64_t top_k = config.router.top_k();
  const std::int64_t of_compute = size_of(compute);
  const bool keeps = recompute == Recompute::kNone;
  const std::int64_t shared =
      keeps && stages_.has_shared() ? tokens * stages_.shared().preactivation_cols() : 0;
  const std::int64_t rows = keeps ? experts.layout_rows(tokens) : 0;
  const LossBytes losses = most_loss_bytes(options_.losses, tokens, config.router.num_experts);
  return {{{SavedMemory::kTokens, of_compute * tokens * hidden},
           {SavedMemory::kLogits,
            config.router.has_logits() ? 4 * tokens * config.router.num_logits() : 0},
           {SavedMemory::kPreviousLogits,
            config.router.gating_residual ? 4 * tokens * config.router.num_logits() : 0},
           {SavedMemory::kExpert, 4 * tokens * top_k},
           {SavedMemory::kWeight, 4 * tokens * top_k},
           {SavedMemory::kKept, options_.capacity_factor ? tokens * top_k : 0},
           {SavedMemory::kPreactivation, of_compute * rows * experts.preactivation_cols()},
           {SavedMemory::kSharedPreactivation, of_compute * shared},
           {SavedMemory::kReceived, of_compute * experts.most_received(tokens) * hidden},
           {SavedMemory::kSent, std::int64_t{8} * num_ranks_ * num_ranks_},
           {SavedMemory::kLosses, losses.sums},
           {SavedMemory::kLossWorkspace, losses.workspace},
           {SavedMemory::kChainLosses, losses.of_chain}}};
}

void ExchangeLayer::make_room(Recompute recompute, DeviceSavedMemory& memory) {
  cudaStream_t stream = stages_.stream();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(stream, &capture));
  require(capture == cudaStreamCaptureStatusNone,
          "a saved forward needs memory, which is not to be had while a stream is captured: make "
          "such a forward with it before");
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  communicator_.barrier("no kernel runs before a way back");
  std::unique_ptr<CudaGradientExchange> made;
  if (gradients_ == nullptr) {
    made = std::make_unique<CudaGradientExchange>(communicator_, config, options_, compute,
                                                  *exchange_);
  }
  backward_.reserve(options_.max_tokens, recompute, stages_,
                    made != nullptr ? made.get() : gradients_.get());
  if (exchange_->place_of_partials().data == nullptr) {
    (void)sums_.matrix(sums_type(), stages_.rows_of_sums(options_.max_tokens),
                       config.experts.hidden);
  }
  for (const SavedPiece& piece : pieces_of(recompute)) {
    (void)memory.reserve(piece.part, piece.bytes);
  }
  load_wire_kernels(compute, options_.dispatch_wire.value_or(compute));
  CudaExperts& experts = stages_.experts();
  if (recompute == Recompute::kNone) {
    DeviceBuffer sums;
    Execution quiet = stages_.execution();
    quiet.recorder = nullptr;
    experts.rehearse(
        sums.matrix(sums_type(), stages_.rows_of_sums(options_.max_tokens), config.experts.hidden),
        stages_.each_group(), quiet,
        {memory.reserve(SavedMemory::kPreactivation, 0), compute,
         experts.layout_rows(options_.max_tokens), experts.preactivation_cols()});
  }
  communicator_.barrier("memory of a way back");
  if (made != nullptr) gradients_ = std::move(made);
  room_recoveries_ = communicator_.recoveries();
}

ConstRawMatrix ExchangeLayer::keep_received(const DeviceReceived& received,
                                            SavedForward::State& saved) {
  const RawMatrix out =
      saved.room(SavedMemory::kReceived, compute, received.x.rows, received.x.cols);
  saved.received.x = out;
  saved.received.sent = saved.room<std::int64_t>(SavedMemory::kSent, num_ranks_, num_ranks_);
  keep_counts(received.counts, saved.received.sent, stages_.stream());
  saved.received.forward = forwards_;
  saved.received.recoveries = communicator_.recoveries();
  const ScopedStage stage(stages_.execution(), stages_.crosses() ? "dequantize" : "pack",
                          {.bytes = static_cast<double>(received.x.bytes() + out.bytes())});
  decode_rows({.x = received.x, .scale = received.scale, .expert = received.expert}, out,
              stages_.stream());
  return out;
}

void ExchangeLayer::count_forward() {
  if (forward_recoveries_ != communicator_.recoveries()) {
    forward_recoveries_ = communicator_.recoveries();
    forwards_ = 0;
  }
  ++forwards_;
}

void ExchangeLayer::backward(const BackwardArgs& args) {
  SavedForward::State& saved = args.saved->state();
  saved.require_of(number_, reloads_);
  require(saved.received.recoveries == communicator_.recoveries(),
          "the ranks have recovered since this saved forward");
  raise_status();
  require_on_device(args, saved.num_tokens > 0);
  stages_.begin(exchange_->stream_for(args, stages_.stream()), args.recorder);
  saved.use = SavedForward::State::Use::kUsed;
  TokensForExperts input = stages_.to_experts(saved);
  input.x = saved.received.x;
  backward_.run(args, saved, input, options_.losses, stages_, gradients_.get());
}

void ExchangeLayer::reload_experts() {
  SWITCHYARD_CUDA(cudaStreamSynchronize(stages_.stream()));
  communicator_.barrier("no kernel runs before experts are reloaded");
  ++reloads_;
  stages_.reload_experts();
  communicator_.barrier("experts are reloaded");
}

}  // namespace switchyard
