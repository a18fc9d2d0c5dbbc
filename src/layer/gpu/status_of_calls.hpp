#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

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
/// in pinned memory that the host looks at without waiting. A call may have several parts, which
/// each report to a place of their own.
class StatusOfCalls {
 public:
  explicit StatusOfCalls(std::int32_t parts) {
    counted_.reserve(sizeof(DeviceStatus));
    for (std::int32_t i = 0; i < parts; ++i) {
      parts_.push_back(std::make_unique<PinnedValue<CallStatus>>());
    }
    reset();
  }
  /// Which part reports from here on.
  void use_part(std::int32_t part) { part_ = static_cast<std::size_t>(part); }
  /// Of Execution::status.
  [[nodiscard]] DeviceStatus* counted() const {
    return reinterpret_cast<DeviceStatus*>(counted_.data());
  }
  /// Of the part.
  [[nodiscard]] CallStatus& place() const { return **parts_[part_]; }
  [[nodiscard]] std::int32_t num_parts() const { return static_cast<std::int32_t>(parts_.size()); }
  [[nodiscard]] const CallStatus& told(std::int32_t part) const {
    return **parts_[static_cast<std::size_t>(part)];
  }
  /// Where the experts' kernels report to.
  [[nodiscard]] PlanReport place_of_report() const {
    return {.status = &place().status,
            .rows_used = &place().rows_used,
            .rows_executed = &place().rows_executed};
  }
  /// What calls have left that an error is due for, once; then it waits for `stream`, theirs.
  [[nodiscard]] std::optional<DeviceStatus> take(cudaStream_t stream) {
    const auto bad = std::find_if(parts_.begin(), parts_.end(),
                                  [](const auto& part) { return !(*part)->status.ok(); });
    if (bad == parts_.end()) return std::nullopt;
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    const DeviceStatus found = (**bad)->status;  // of the first, for it counts on
    reset();
    return found;
  }

 private:
  void reset() {
    const DeviceStatus fresh;
    copy_to_device(counted_.data(), &fresh, sizeof(fresh));
    for (const auto& part : parts_) (*part)->status = fresh;
  }

  DeviceBuffer counted_;
  std::vector<std::unique_ptr<PinnedValue<CallStatus>>> parts_;
  std::size_t part_ = 0;
};

}  // namespace switchyard
