#pragma once

// What kernels over tokens share that take 16 bytes of one at a time.

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"
#include "switchyard/execution.hpp"

namespace switchyard {

inline constexpr int kTokenThreads = 256;

template <typename T>
__device__ __forceinline__ void load_token_values(const void* tokens, std::int64_t at,
                                                  float (&x)[kPack<T>]) {
  unpack16(*reinterpret_cast<const int4*>(static_cast<const T*>(tokens) + at), x, T{});
}

/// Blocks of kTokenThreads for so many threads, as far as more would not help.
inline unsigned token_blocks(std::int64_t threads) {
  const std::int64_t wanted = (threads + kTokenThreads - 1) / kTokenThreads;
  return static_cast<unsigned>(std::clamp<std::int64_t>(wanted, 1, 16 * num_multiprocessors()));
}

/// Calls with a value of the type for `dtype`.
template <typename Call>
void with_token_type(DType dtype, Call&& call) {
  switch (dtype) {
    case DType::kBF16: call(__nv_bfloat16{}); break;
    case DType::kF16: call(__half{}); break;
    default: call(float{}); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

inline cudaStream_t stream_of_call(const Execution& execution) {
  return static_cast<cudaStream_t>(execution.stream);
}

}  // namespace switchyard
