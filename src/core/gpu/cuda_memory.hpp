#pragma once

#include "core/gpu/device_buffer.hpp"
#include "switchyard/execution.hpp"

namespace switchyard {

/// False for host memory, pinned or not.
[[nodiscard]] inline bool is_on_device(const void* p) {
  cudaPointerAttributes attributes{};
  SWITCHYARD_CUDA(cudaPointerGetAttributes(&attributes, p));
  return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

[[nodiscard]] inline Execution with_workspace(Execution execution, const DeviceBuffer& workspace) {
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.bytes();
  return execution;
}

}  // namespace switchyard
