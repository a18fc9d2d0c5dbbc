#pragma once

// What launches ask of the current device and of pointers, on the host.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <type_traits>
#include <utility>

#include "core/gpu/cuda_check.hpp"

namespace switchyard {

[[nodiscard]] inline int current_device() {
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  return device;
}

/// Of the current device. A call of a layer asks dozens of times: a thread asks CUDA once.
[[nodiscard]] inline int device_attribute(cudaDeviceAttr attribute) {
  const int device = current_device();
  thread_local std::map<std::pair<int, cudaDeviceAttr>, int> known;
  const auto [place, is_new] = known.try_emplace({device, attribute}, 0);
  if (is_new) {
    const cudaError_t status = cudaDeviceGetAttribute(&place->second, attribute, device);
    if (status != cudaSuccess) known.erase(place);
    SWITCHYARD_CUDA(status);
  }
  return place->second;
}

[[nodiscard]] inline int num_multiprocessors() {
  return device_attribute(cudaDevAttrMultiProcessorCount);
}

/// Kernels move 16 bytes at a time; null is aligned.
[[nodiscard]] inline bool is_aligned_16(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

/// Lets launches of `kernel` take as much dynamic shared memory as a block can have. The bound is
/// the kernel's, not the launch's: set to what one launch needs, it could fall short of what
/// another thread is about to launch. Returns that most. It lasts, and CUDA takes longer for it
/// than for a launch: a thread asks once.
inline int allow_most_shared_memory(const void* kernel) {
  thread_local std::map<std::pair<const void*, int>, int> known;
  const std::pair<const void*, int> key{kernel, current_device()};
  if (const auto found = known.find(key); found != known.end()) return found->second;
  cudaFuncAttributes attributes{};
  SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) -
                   static_cast<int>(attributes.sharedSizeBytes);
  if (attributes.maxDynamicSharedSizeBytes < most) {
    SWITCHYARD_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  }
  known.emplace(key, most);
  return most;
}

#ifdef __CUDACC__
/// Launches `kernel` with all its blocks resident at once: they may wait for each other.
template <typename Params>
void launch_together(void (*kernel)(Params), int blocks, int threads, std::size_t shared_bytes,
                     cudaStream_t stream, const Params& params) {
  // Also what the kernel declares statically counts against the 48 KB that need no leave.
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = blocks > 1 ? 1 : 0;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

/// Launches `kernel`, on Hopper where it `may` before the previous kernel of the stream has ended,
/// however many blocks it has: it must call ptx::start_after_previous_kernel(), or its two halves,
/// before it touches what that one reads or writes.
template <typename... Params>
void launch_dependent(bool may, void (*kernel)(Params...), dim3 blocks, int threads,
                      std::size_t shared_bytes, cudaStream_t stream,
                      const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  // Later chips run the PTX of sm_80, which has no such wait.
  config.numAttrs = may && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 ? 1 : 0;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, kernel, params...));
}

/// The same of kernels of few blocks. Many would take the room of the kernel before (select of 4096
/// tokens, 512 blocks: 10.4 instead of 9.2 us).
template <typename... Params>
void launch_overlapped_if(bool may, void (*kernel)(Params...), dim3 blocks, int threads,
                          std::size_t shared_bytes, cudaStream_t stream,
                          const std::type_identity_t<Params>&... params) {
  const bool few = static_cast<int>(blocks.x * blocks.y) <= 2 * num_multiprocessors();
  launch_dependent(may && few, kernel, blocks, threads, shared_bytes, stream, params...);
}

template <typename... Params>
void launch_overlapped(void (*kernel)(Params...), dim3 blocks, int threads,
                       std::size_t shared_bytes, cudaStream_t stream,
                       const std::type_identity_t<Params>&... params) {
  launch_overlapped_if(true, kernel, blocks, threads, shared_bytes, stream, params...);
}
#endif

}  // namespace switchyard
