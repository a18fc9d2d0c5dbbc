#pragma once

// Weights that a kernel streams as they are stored: codes become bf16 numbers in registers. Their
// memory is coded/layout.hpp's.
//
// Four schedulers of an SM have 124 cycles each for 1024 weights of MXFP4 at 4.3 TB/s; the way of
// 1024 weights through a warp is 85 instructions for up to 8 tokens.

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/coded/layout.hpp"

namespace switchyard::streaming {

/// Weights that are stored as codes, for tokens of bf16.
template <WeightFormat kFormat>
struct Coded {};

/// What the kernels ask of weights: numbers of the compute type by themselves, or codes.
template <typename W>
struct Weights {
  using Token = W;
  static constexpr bool kCoded = false;
  static constexpr WeightFormat kFormat = WeightFormat::kExact;
  static constexpr int kRowUnit = 1;  // rows that lie together
};

/// From where a step's codes of 8 rows begin to the lane's.
template <WeightFormat kFormat>
__device__ __forceinline__ int lane_place() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return kFormat == WeightFormat::kE4M3 ? coded::e4m3_place(lane / 4, lane % 4) : 8 * lane;
}

template <WeightFormat kStored>
struct Weights<Coded<kStored>> {
  using Token = __nv_bfloat16;
  static constexpr bool kCoded = true;
  static constexpr WeightFormat kFormat = kStored;
  static constexpr int kRowUnit = coded::kGroupRows;
  static constexpr int kUnitBytes = coded::unit_bytes(kStored);
};

template <typename W>
using TokenOf = typename Weights<W>::Token;

inline constexpr int kUnitTokenBytes = 2 * coded::kUnitValues;
/// Units that a warp multiplies in a turn.
inline constexpr int kTurnUnits = 2;
inline constexpr int kTurnTokenBytes = kTurnUnits * kUnitTokenBytes;

/// Bytes of 8 rows in a stage that has `piece` bytes of each token row.
template <typename W>
__device__ __forceinline__ int group_stride(int piece) {
  return piece / kUnitTokenBytes * Weights<W>::kUnitBytes;
}

/// Both numbers of a word times both of another, exact.
__device__ __forceinline__ std::uint32_t multiply_pair(std::uint32_t a, std::uint32_t b) {
  union {
    std::uint32_t bits;
    __nv_bfloat162 pair;
  } x, y;
  x.bits = a;
  y.bits = b;
  x.pair = __hmul2(x.pair, y.pair);
  return x.bits;
}

/// A lane's 8 numbers of a row and a step, as they would lie in memory: four words.
__device__ __forceinline__ uint4 mxfp4_numbers(std::uint32_t word, std::uint32_t raise) {
  return {multiply_pair(coded::mxfp4_pair<0>(word), raise),
          multiply_pair(coded::mxfp4_pair<1>(word), raise),
          multiply_pair(coded::mxfp4_pair<2>(word), raise),
          multiply_pair(coded::mxfp4_pair<3>(word), raise)};
}
/// The first (or last) two codes of a word as numbers.
template <bool kLast>
__device__ __forceinline__ std::uint32_t e4m3_numbers(std::uint32_t word) {
  const std::uint32_t wide = __byte_perm(word, 0, kLast ? 0x3424 : 0x1404);
  return multiply_pair(coded::e4m3_pair(wide), coded::kE4M3Raise);
}
__device__ __forceinline__ uint4 e4m3_numbers(uint2 words) {
  return {e4m3_numbers<false>(words.x), e4m3_numbers<true>(words.x), e4m3_numbers<false>(words.y),
          e4m3_numbers<true>(words.y)};
}

/// Adds w0 (rows g), w1 (rows g + 8) times a tile of tokens.
__device__ __forceinline__ void multiply_step(float (&sum)[4], const uint4& w0, const uint4& w1,
                                              const uint4& x) {
  const std::uint32_t low[4] = {w0.x, w1.x, w0.y, w1.y};
  const std::uint32_t high[4] = {w0.z, w1.z, w0.w, w1.w};
  ptx::mma_bf16(sum, low, x.x, x.y);
  ptx::mma_bf16(sum, high, x.z, x.w);
}

/// The factors of a lane's two groups of 8 rows, upper and lower. MXFP4: of their matrices.
struct MatrixScales {
  const float* upper = nullptr;
  const float* lower = nullptr;
};

/// e4m3: of blocks of 128 along the sum, so many; 64 at a time are kept by the lanes of a warp.
struct BlockScales {
  static constexpr int kKept = 64;
  const float* upper = nullptr;
  const float* lower = nullptr;
  int blocks = 0;
  int first = -kKept;
  float kept[4] = {};

  __device__ __forceinline__ void at(int block, float& upper_scale, float& lower_scale) {
    if (block >= first + kKept) load(block / kKept * kKept);
    const int k = block - first;
    upper_scale = __shfl_sync(~0U, k < 32 ? kept[0] : kept[1], k % 32);
    lower_scale = __shfl_sync(~0U, k < 32 ? kept[2] : kept[3], k % 32);
  }
  __device__ __forceinline__ void load(int from) {
    first = from;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block = min(from + 32 * i + lane, blocks - 1);
      kept[i] = __ldg(upper + block);
      kept[2 + i] = __ldg(lower + block);
    }
  }
};
struct NoScales {};

template <WeightFormat kFormat>
struct ScalesOfFormat {
  using Type = NoScales;
};
template <>
struct ScalesOfFormat<WeightFormat::kMxfp4> {
  using Type = MatrixScales;
};
template <>
struct ScalesOfFormat<WeightFormat::kE4M3> {
  using Type = BlockScales;
};
template <typename W>
using ScalesOf = typename ScalesOfFormat<Weights<W>::kFormat>::Type;

/// A turn of a warp: kTurnUnits units against kTokenTiles tiles of 8 tokens. `codes0`, `codes1`:
/// the lane's first codes in each group of 8 rows; `load(n, step)` gives its 16 bytes of token tile
/// n; `steps` of the turn exist; `block` counts turns along the sum.
template <typename W>
struct TurnMath;

template <>
struct TurnMath<Coded<WeightFormat::kMxfp4>> {
  template <int kTokenTiles, typename LoadTokens>
  static __device__ __forceinline__ void multiply(float (&sums)[kTokenTiles][4],
                                                  const unsigned char* codes0,
                                                  const unsigned char* codes1, int steps,
                                                  int /*block*/, MatrixScales& /*scales*/,
                                                  LoadTokens&& load) {
    // From the lane's codes to its row's scales.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int to_scales = coded::kMxfp4ScalesAt + lane / 4 * 2 - 8 * lane;
    const unsigned char* scales0 = codes0 + to_scales;
    const unsigned char* scales1 = codes1 + to_scales;
#pragma unroll
    for (int half = 0; half < kTurnUnits; ++half) {
      if (half > 0 && steps <= 2 * half) break;
      const int at = half * coded::kMxfp4UnitBytes;
      const uint2 w0 = *reinterpret_cast<const uint2*>(codes0 + at);
      const uint2 w1 = *reinterpret_cast<const uint2*>(codes1 + at);
      const std::uint32_t s0 = *reinterpret_cast<const std::uint16_t*>(scales0 + at);
      const std::uint32_t s1 = *reinterpret_cast<const std::uint16_t*>(scales1 + at);
      step<kTokenTiles>(sums, w0.x, w1.x, s0 & 255U, s1 & 255U, 2 * half, load);
      if (steps <= 2 * half + 1) break;
      step<kTokenTiles>(sums, w0.y, w1.y, s0 >> 8, s1 >> 8, 2 * half + 1, load);
    }
  }

  template <int kTokenTiles, typename LoadTokens>
  static __device__ __forceinline__ void step(float (&sums)[kTokenTiles][4], std::uint32_t word0,
                                              std::uint32_t word1, std::uint32_t scale0,
                                              std::uint32_t scale1, int at, LoadTokens&& load) {
    const uint4 w0 = mxfp4_numbers(word0, scale0 * coded::kMxfp4Exponents);
    const uint4 w1 = mxfp4_numbers(word1, scale1 * coded::kMxfp4Exponents);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) multiply_step(sums[n], w0, w1, load(n, at));
  }

  /// The sums of an item are of numbers that the matrices' factors still have to multiply.
  template <int kTokenTiles>
  static __device__ __forceinline__ void finish(float (&sums)[kTokenTiles][4],
                                                const MatrixScales& scales) {
    const float upper = __ldg(scales.upper);
    const float lower = __ldg(scales.lower);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      sums[n][0] *= upper;
      sums[n][1] *= upper;
      sums[n][2] *= lower;
      sums[n][3] *= lower;
    }
  }
};

template <>
struct TurnMath<Coded<WeightFormat::kE4M3>> {
  // A turn is one block of scales along the sum.
  static_assert(kTurnUnits * coded::kUnitValues == kE4M3Block);

  template <int kTokenTiles, typename LoadTokens>
  static __device__ __forceinline__ void multiply(float (&sums)[kTokenTiles][4],
                                                  const unsigned char* codes0,
                                                  const unsigned char* codes1, int steps, int block,
                                                  BlockScales& scales, LoadTokens&& load) {
    float part[kTokenTiles][4] = {};
#pragma unroll
    for (int step = 0; step < 2 * kTurnUnits; ++step) {
      if (step > 0 && steps <= step) break;
      const int at = step * coded::kE4M3StepBytes;
      const uint4 w0 = e4m3_numbers(*reinterpret_cast<const uint2*>(codes0 + at));
      const uint4 w1 = e4m3_numbers(*reinterpret_cast<const uint2*>(codes1 + at));
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) multiply_step(part[n], w0, w1, load(n, step));
    }
    float upper;
    float lower;
    scales.at(block, upper, lower);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      sums[n][0] = fmaf(part[n][0], upper, sums[n][0]);
      sums[n][1] = fmaf(part[n][1], upper, sums[n][1]);
      sums[n][2] = fmaf(part[n][2], lower, sums[n][2]);
      sums[n][3] = fmaf(part[n][3], lower, sums[n][3]);
    }
  }

  template <int kTokenTiles>
  static __device__ __forceinline__ void finish(float (&/*sums*/)[kTokenTiles][4],
                                                const BlockScales& /*scales*/) {}
};

}  // namespace switchyard::streaming
