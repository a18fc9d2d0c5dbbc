#pragma once

// What the kernels of a model share: launches, sums of a warp, and rows of f32 or bf16 as floats.

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"

namespace switchyard::models::gpu {

using Bf16 = __nv_bfloat16;

template <typename... Params>
void launch(void (*kernel)(Params...), dim3 blocks, dim3 threads, std::size_t shared_bytes,
            cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  if (shared_bytes > (48U << 10U)) {
    allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, kernel, params...));
}

[[nodiscard]] inline unsigned blocks_for(std::int64_t count, std::int64_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

/// The same in all lanes, by a fixed tree.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffU, x, i);
  return x;
}
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffU, x, i);
  return x;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void store(float* to, float x) { *to = x; }
__device__ __forceinline__ void store(Bf16* to, float x) { *to = __float2bfloat16(x); }

/// Four neighbours as they lie in memory, aligned to what they take,
template <typename T>
using Four = std::conditional_t<sizeof(T) == 4, float4, uint2>;
template <typename T>
__device__ __forceinline__ Four<T> load_four(const T* from) {
  return *reinterpret_cast<const Four<T>*>(from);
}
/// and as floats.
__device__ __forceinline__ void widen(const float4& v, float (&x)[4]) {
  x[0] = v.x;
  x[1] = v.y;
  x[2] = v.z;
  x[3] = v.w;
}
__device__ __forceinline__ void widen(const uint2& v, float (&x)[4]) {
  x[0] = __uint_as_float(v.x << 16U);
  x[1] = __uint_as_float(v.x & 0xffff0000U);
  x[2] = __uint_as_float(v.y << 16U);
  x[3] = __uint_as_float(v.y & 0xffff0000U);
}
template <typename T>
__device__ __forceinline__ void load4(const T* from, float (&x)[4]) {
  widen(load_four(from), x);
}
template <typename T>
__device__ __forceinline__ void store4(T* to, const float (&x)[4]) {
  store_floats(to, x);
}

/// Calls `body` with a value of the type that `bf16` says.
template <class Body>
void by_type(bool bf16, const Body& body) {
  if (bf16) {
    body(Bf16{});
  } else {
    body(float{});
  }
}

/// out[c] = (accumulate ? out[c] : 0) + parts[0][c] + parts[1][c] + ...: sums that blocks have
/// left, of `size` columns in rows of `stride`, in an order that sizes alone decide.
void sum_parts(const float* parts, std::int64_t count, std::int64_t size, std::int64_t stride,
               bool accumulate, float* out, cudaStream_t stream);

}  // namespace switchyard::models::gpu
