// Steps of training on a GPU. A step is one graph: forward, backward, norm, optimiser and biases;
// of several calls, one for each call, the last with the optimiser. What changes from step to step
// (tokens, learning rate) is copied in before it, what it leaves is copied out behind it.
#include <algorithm>

#include "core/check.hpp"
#include "models/gpu/model.hpp"

namespace switchyard::models::gpu {

void GpuModel::upload_moments(AdamW& optimizer) {
  upload_if_stale();
  parameters_.upload_moments(optimizer, stream_.get());
  adamw_ = optimizer.config();
  StepFactors factors{};
  factors.steps = optimizer.steps();
  SWITCHYARD_CUDA(cudaMemcpyAsync(&device_record()->factors, &factors, sizeof(factors),
                                  cudaMemcpyHostToDevice, stream_.get()));
  stream_.wait();
}

void GpuModel::download_moments(AdamW& optimizer) {
  parameters_.download_moments(optimizer, stream_.get());
  StepFactors factors{};
  SWITCHYARD_CUDA(cudaMemcpyAsync(&factors, &device_record()->factors, sizeof(factors),
                                  cudaMemcpyDeviceToHost, stream_.get()));
  stream_.wait();
  optimizer.set_steps(factors.steps);
}

/// A call is enqueued as it is the first time, which makes all memory and asks for all that a graph
/// cannot; then captured, and from then on launched.
void GpuModel::enqueue_or_replay(const Call& call, bool with_update) {
  Captured& captured = graphs_[call.accumulate ? 1 : 0][with_update ? 1 : 0];
  bool may = !parameters_.shares_gpu();
  for (const DeviceBlock& block : blocks_) may = may && block.may_be_captured(true);
  const bool same = captured.call.batch == call.batch &&
                    captured.call.positions == call.positions && captured.call.scale == call.scale;
  if (!may || !captured.warm || !same) {
    captured.graph.reset();
    captured.call = call;
    captured.warm = true;
    enqueue(call, with_update);
    return;
  }
  if (!captured.graph) {
    captured.graph.emplace(stream_.get(), [&] { enqueue(call, with_update); });
  }
  captured.graph->launch(stream_.get());
}

/// Of each call's sequences a rank takes neighbouring ones.
void GpuModel::start_step(const DeviceStepArgs& args) {
  require(parameters_.trains(), "a step without moments: upload_moments() comes first");
  const std::int64_t positions = args.tokens.shape[1];
  const std::int64_t rows = args.tokens.shape[0] / args.calls;
  const std::int64_t num_ranks = ranks_ == nullptr ? 1 : ranks_->size();
  const std::int64_t own_rows = rows / num_ranks, own = own_rows * positions;
  const std::int64_t first_own = ranks_ == nullptr ? 0 : ranks_->rank() * own;
  upload_if_stale();
  Call call{.batch = own_rows,
            .positions = positions,
            .training = true,
            .scale = 1.0 / static_cast<double>(args.calls),
            .step = args.step};
  reserve(call);
  for (std::int64_t i = 0; i < args.calls; ++i) {
    const std::int64_t first = i * rows * positions;
    call.accumulate = i > 0;
    call.first_token = first + first_own;
    next_slot_ = (next_slot_ + 1) % kSlots;
    Slot& slot = slots_[next_slot_];
    if (slot.busy) {  // of this step, more calls than slots ago
      slot.done.wait();
      read_record(next_slot_, slot.call, step_stats_);
      slot.busy = false;
    }
    const std::int32_t* const targets = args.targets.data + first;
    slot.targets =
        std::count_if(targets, targets + rows * positions, [](std::int32_t id) { return id >= 0; });
    const auto part = [&](Matrix<const std::int32_t> ids) {
      return Matrix<const std::int32_t>{ids.data + call.first_token, {own_rows, positions}};
    };
    CallInputs inputs = inputs_of(slot.targets, call.scale);
    inputs.optimizer.learning_rate = args.learning_rate;
    send(part(args.tokens), part(args.targets), inputs);
    enqueue_or_replay(call, i + 1 == args.calls);
    fetch_record(next_slot_);
    slot.call = call;
    slot.busy = true;
  }
  step_slot_ = next_slot_;
}

DeviceStepResult GpuModel::finish_step() {
  slots_[step_slot_].done.wait();
  for (std::size_t i = 1; i <= kSlots; ++i) {  // oldest first
    const std::size_t slot = (step_slot_ + i) % kSlots;
    if (!slots_[slot].busy) continue;
    read_record(slot, slots_[slot].call, step_stats_);
    slots_[slot].busy = false;
  }
  check_blocks();
  const auto* const record = reinterpret_cast<const CallRecord*>(slots_[step_slot_].record.data());
  return {.stats = step_stats_, .norm = record->factors.norm};
}

}  // namespace switchyard::models::gpu
