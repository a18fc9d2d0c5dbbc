#pragma once

#include <array>

#include "core/gpu/device_buffer.hpp"
#include "experts/gpu/workspace.hpp"
#include "layer/expert_runner.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What layers share on one GPU: memory in which a call leaves nothing. Whoever uses it asks for
/// its size and its address in each call, for others may have grown it.
struct CudaScratch final : LayerScratch {
  /// Of the device that is current.
  CudaScratch();

  int device = 0;
  DeviceBuffer converted;                ///< Tokens, or what goes back, in the compute type.
  DeviceBuffer workspace;                ///< Of experts(): counters that calls leave at zero first.
  ExpertRunner<DeviceBuffer> runner;     ///< The experts' rows.
  DeviceBuffer shared_workspace;         ///< Likewise of shared experts,
  DeviceBuffer shared_rows;              ///< and their rows.
  std::array<DeviceBuffer, 2> backward;  ///< Of experts_backward(), for either Recompute.

  /// Where experts have their inner rows, behind the workspace's counters: `bytes` of it at least.
  std::byte* inner_rows(std::int64_t bytes = 0) {
    return workspace.reserve(kActAt + bytes) + kActAt;
  }
};

/// That of the options, or a new one.
/// @throws Error{kInvalidArgument}: it is on another GPU than the current one.
[[nodiscard]] std::shared_ptr<CudaScratch> scratch_of(const LayerOptions& options);

}  // namespace switchyard
