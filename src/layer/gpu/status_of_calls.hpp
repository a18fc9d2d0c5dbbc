#pragma once

#include <optional>

#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/device_buffer.hpp"
#include "experts/gpu/streaming/streaming.hpp"
#include "layer/gpu/call_status.hpp"
#include "switchyard/router.hpp"

namespace switchyard {

/// @throws Error{kInvalidArgument} that names the token whose id has no experts, if there is one.
inline void require_token_ids(const DeviceStatus& found, const RouterConfig& config) {
  if (found.bad_token_id == DeviceStatus::kNone) return;
  const auto* hash = std::get_if<HashRouter>(&config.kind);
  const bool table = hash != nullptr && hash->table != nullptr;
  fail(ErrorCode::kInvalidArgument, "token_ids[{}] is {}, want 0 to {}", found.bad_token_id >> 32,
       static_cast<std::int32_t>(found.bad_token_id & 0xffffffffU),
       (table ? std::ssize(*hash->table) / hash->top_k : std::int64_t{1} << 31) - 1);
}

/// The status of calls on one stream after the other: what kernels count on the GPU, and the copy
/// in pinned memory that the host looks at without waiting.
class StatusOfCalls {
 public:
  StatusOfCalls() {
    counted_.reserve(sizeof(DeviceStatus));
    reset();
  }
  /// Of Execution::status.
  [[nodiscard]] DeviceStatus* counted() const {
    return reinterpret_cast<DeviceStatus*>(counted_.data());
  }
  [[nodiscard]] CallStatus& told() const { return *told_; }
  /// Where the experts' kernels report to.
  [[nodiscard]] PlanReport place_of_report() const {
    return {.status = &told_->status,
            .rows_used = &told_->rows_used,
            .rows_executed = &told_->rows_executed};
  }
  /// What calls have left that an error is due for, once; then it waits for `stream`, theirs.
  [[nodiscard]] std::optional<DeviceStatus> take(cudaStream_t stream) {
    const DeviceStatus found = told_->status;
    if (found.ok()) return std::nullopt;
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    reset();
    return found;
  }

 private:
  void reset() {
    const DeviceStatus fresh;
    copy_to_device(counted_.data(), &fresh, sizeof(fresh));
    told_->status = fresh;
  }

  DeviceBuffer counted_;
  PinnedValue<CallStatus> told_;
};

}  // namespace switchyard
