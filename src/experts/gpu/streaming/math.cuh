#pragma once

// One step of the products of a weight tile with a few token rows: 16 rows of weights by 64 bytes
// along the sum, against up to 8 tiles of 8 tokens, on tensor cores with the weights as the M side.
//
// Lane (g, t) = (lane / 4, lane % 4) holds 16 bytes of weight rows g and g + 8 and of token row g,
// as they lie in memory. The instruction would hand lane t other values of the sum's index, but all
// operands permute it alike, so no ldmatrix and no shuffle is needed.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/gpu/ptx.cuh"

namespace switchyard::streaming {

/// `load(n)` gives the lane's 16 bytes of token tile n; `kBatch` tiles are worked on at a time.
template <typename T>
struct StepMath;

/// 16-bit types: a step is 32 values, two products of depth 16; exact, fp32 sums.
template <>
struct StepMath<__nv_bfloat16> {
  template <int kTokenTiles, int kBatch, typename LoadTokens>
  static __device__ __forceinline__ void multiply(float (&sums)[kTokenTiles][4], uint4 w0, uint4 w1,
                                                  LoadTokens&& load) {
    const std::uint32_t low[4] = {w0.x, w1.x, w0.y, w1.y};
    const std::uint32_t high[4] = {w0.z, w1.z, w0.w, w1.w};
#pragma unroll
    for (int first = 0; first < kTokenTiles; first += kBatch) {
      uint4 x[kBatch];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) x[n] = load(first + n);
#pragma unroll
      for (int n = 0; n < kBatch; ++n) ptx::mma_bf16(sums[first + n], low, x[n].x, x[n].y);
#pragma unroll
      for (int n = 0; n < kBatch; ++n) ptx::mma_bf16(sums[first + n], high, x[n].z, x[n].w);
    }
  }
};

template <>
struct StepMath<__half> {
  template <int kTokenTiles, int kBatch, typename LoadTokens>
  static __device__ __forceinline__ void multiply(float (&sums)[kTokenTiles][4], uint4 w0, uint4 w1,
                                                  LoadTokens&& load) {
    const std::uint32_t low[4] = {w0.x, w1.x, w0.y, w1.y};
    const std::uint32_t high[4] = {w0.z, w1.z, w0.w, w1.w};
#pragma unroll
    for (int first = 0; first < kTokenTiles; first += kBatch) {
      uint4 x[kBatch];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) x[n] = load(first + n);
#pragma unroll
      for (int n = 0; n < kBatch; ++n) ptx::mma_f16(sums[first + n], low, x[n].x, x[n].y);
#pragma unroll
      for (int n = 0; n < kBatch; ++n) ptx::mma_f16(sums[first + n], high, x[n].z, x[n].w);
    }
  }
};

/// f32: a step is 16 values. Each value is split into its upper 11 bits and the exact rest, and
/// three of the four products of TF32 are kept; what is lost is about 2^-21 of a product.
template <>
struct StepMath<float> {
  static __device__ __forceinline__ void split(std::uint32_t value, std::uint32_t& high,
                                               std::uint32_t& low) {
    high = value & 0xffffe000U;
    low = __float_as_uint(__uint_as_float(value) - __uint_as_float(high));
  }

  template <int kTokenTiles, int kBatch, typename LoadTokens>
  static __device__ __forceinline__ void multiply(float (&sums)[kTokenTiles][4], uint4 w0, uint4 w1,
                                                  LoadTokens&& load) {
#pragma unroll
    for (int first = 0; first < kTokenTiles; first += kBatch) {
      // The tensor core truncates as it adds; adding each step's sum here, rounded to nearest,
      // keeps a long sum unbiased. The three products are chains of their own.
      float part[3][kBatch][4] = {};
      uint4 x[kBatch];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) x[n] = load(first + n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t high[4];
        std::uint32_t low[4];
        split(half == 0 ? w0.x : w0.z, high[0], low[0]);
        split(half == 0 ? w1.x : w1.z, high[1], low[1]);
        split(half == 0 ? w0.y : w0.w, high[2], low[2]);
        split(half == 0 ? w1.y : w1.w, high[3], low[3]);
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          std::uint32_t x_high[2];
          std::uint32_t x_low[2];
          split(half == 0 ? x[n].x : x[n].z, x_high[0], x_low[0]);
          split(half == 0 ? x[n].y : x[n].w, x_high[1], x_low[1]);
          ptx::mma_tf32(part[0][n], low, x_high[0], x_high[1]);
          ptx::mma_tf32(part[1][n], high, x_low[0], x_low[1]);
          ptx::mma_tf32(part[2][n], high, x_high[0], x_high[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[first + n][i] += part[2][n][i] + (part[0][n][i] + part[1][n][i]);
        }
      }
    }
  }
};

__device__ __forceinline__ void store_as(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void store_as(__half* to, float value) { *to = __float2half_rn(value); }
__device__ __forceinline__ void store_as(float* to, float value) { *to = value; }

__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(float value) { return value; }

}  // namespace switchyard::streaming
