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

/// From host memory that is not pinned; done when it returns. cudaMemcpy() alone may return while
/// bytes are on their way, and a stream that does not wait for the default one would read what was
/// there.
inline void copy_to_device(void* to, const void* from, std::size_t bytes) {
  SWITCHYARD_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  SWITCHYARD_CUDA(cudaStreamSynchronize(nullptr));
}

[[nodiscard]] inline Execution with_workspace(Execution execution, const DeviceBuffer& workspace) {
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.bytes();
  return execution;
}

}  // namespace switchyard
