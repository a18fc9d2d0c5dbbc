#pragma once

// A thread a number: kernels of any size of grid that go over an array in strides.

#include <algorithm>
#include <cstdint>

#include "core/gpu/cuda_device.hpp"

namespace switchyard::each {

inline constexpr int kThreads = 256;  ///< Of a block.

/// Of a grid for `size` numbers: as many as are useful, at most 32 a multiprocessor.
inline unsigned blocks_for(std::int64_t size) {
  const std::int64_t wanted = (size + kThreads - 1) / kThreads;
  return static_cast<unsigned>(std::min<std::int64_t>(wanted, 32 * num_multiprocessors()));
}

/// Calls work(i) for each i below `size` that is this thread's.
template <typename Work>
__device__ __forceinline__ void for_each(std::int64_t size, Work&& work) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += stride) {
    work(i);
  }
}

}  // namespace switchyard::each
