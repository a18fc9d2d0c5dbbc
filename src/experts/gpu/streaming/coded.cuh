#pragma once

// Weights that a kernel streams as they are stored: codes become bf16 numbers in registers
// (coded/numbers.cuh). Their memory is coded/layout.hpp's.
//
// At 4.3 TB/s an SM has 58 cycles for 2048 weights of MXFP4 and 110 of e4m3. Their way through a
// warp (16 rows, up to 8 tokens) is 189 and 211 instructions for four schedulers; logic and
// permutes, of which a scheduler starts one in two cycles, are 88 and 94 of them.

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/coded/numbers.cuh"
#include "experts/gpu/streaming/ring.cuh"

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

/// Who multiplies codes: where a block has the registers of an SM (`kMaxTokenTiles` 8), more warps
/// take turns, since each waits longer than memory does.
template <typename W, int kMaxTokenTiles>
using CrewOf = Crew<Weights<W>::kCoded && kMaxTokenTiles == 8 ? kManyConsumers : kFewConsumers>;

/// Sums that a warp keeps of each tile of tokens, of every other product: a product waits for the
/// one before in its chain, and with few tiles there is nothing else to do meanwhile.
template <int kTokenTiles>
inline constexpr int kChains = kTokenTiles <= 2 ? 2 : 1;

/// A warp's sums of 16 weight rows and tiles of 8 tokens.
template <int kTokenTiles, int kChained>
struct CodedSums {
  float chain[kChained][kTokenTiles][4] = {};

  /// Adds w0 (rows g), w1 (rows g + 8) times a tile of tokens.
  __device__ __forceinline__ void multiply(int n, const uint4& w0, const uint4& w1,
                                           const uint4& x) {
    const std::uint32_t low[4] = {w0.x, w1.x, w0.y, w1.y};
    const std::uint32_t high[4] = {w0.z, w1.z, w0.w, w1.w};
    ptx::mma_bf16(chain[0][n], low, x.x, x.y);
    ptx::mma_bf16(chain[kChained - 1][n], high, x.z, x.w);
  }
  /// The sums of all chains in the first.
  __device__ __forceinline__ void add_chains() {
    if constexpr (kChained == 2) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) chain[0][n][i] += chain[1][n][i];
      }
    }
  }
};

/// The factors of a lane's two groups of 8 rows, upper and lower. MXFP4: of their matrices.
struct MatrixScales {
  const float* upper = nullptr;
  const float* lower = nullptr;
  float kept[2] = {};

  /// Long before they are needed.
  __device__ __forceinline__ void fetch() {
    kept[0] = __ldg(upper);
    kept[1] = __ldg(lower);
  }
};

/// e4m3: of blocks of 128 along the sum, so many; 64 at a time are kept by the lanes of a warp.
struct BlockScales {
  static constexpr int kKept = 64;
  const float* upper = nullptr;
  const float* lower = nullptr;
  int blocks = 0;
  int first = 0;
  float kept[4] = {};

  __device__ __forceinline__ void fetch() { load(0); }
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

/// From a turn's first values of a token to the lane's of a step, as its codes lie.
/// @param kWhole  All steps of the turn exist; else `steps` do.
template <WeightFormat kFormat, bool kWhole>
__device__ __forceinline__ int lane_tokens(int step, int steps) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  if constexpr (kFormat == WeightFormat::kMxfp4) {
    // coded::mxfp4_place(): 16 values of a unit, or 8 of half of one.
    const bool half = !kWhole && step % 2 == 0 && step == steps - 1;
    return step / 2 * kUnitTokenBytes + t * (half ? 16 : 32) + step % 2 * 16;
  } else {
    return step * (kUnitTokenBytes / 2) + t * 16;
  }
}

/// A turn of a warp: kTurnUnits units of kGroups (1 or 2) groups of 8 weight rows against
/// kTokenTiles tiles of 8 tokens. `codes`: the lane's first codes in each group; `load(n, step)`
/// gives its 16 bytes of token tile n; `steps` of the turn exist (kWhole: all); `block` counts
/// turns along the sum.
template <typename W>
struct TurnMath;

template <>
struct TurnMath<Coded<WeightFormat::kMxfp4>> {
  template <int kTokenTiles>
  using Sums = CodedSums<kTokenTiles, kChains<kTokenTiles>>;

  template <bool kWhole, int kGroups, int kTokenTiles, typename LoadTokens>
  static __device__ __forceinline__ void multiply(Sums<kTokenTiles>& sums,
                                                  const unsigned char* (&codes)[kGroups], int steps,
                                                  int /*block*/, MatrixScales& /*scales*/,
                                                  LoadTokens&& load) {
    // From the lane's codes to their scale.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int to_scale = coded::kMxfp4ScalesAt + lane / 2 - 8 * lane;
#pragma unroll
    for (int half = 0; half < kTurnUnits; ++half) {
      if (!kWhole && half > 0 && steps <= 2 * half) break;
      const int at = half * coded::kMxfp4UnitBytes;
      uint2 words[kGroups];
      std::uint32_t raise[kGroups];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        words[i] = *reinterpret_cast<const uint2*>(codes[i] + at);
        raise[i] = codes[i][to_scale + at] * coded::kMxfp4Exponents;
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if (!kWhole && s > 0 && steps <= 2 * half + 1) break;
        uint4 w[2] = {};
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          w[i] = coded::mxfp4_numbers(s == 0 ? words[i].x : words[i].y, raise[i]);
        }
        const int step = 2 * half + s;
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          sums.multiply(n, w[0], w[1], load(n, step));
        }
      }
    }
  }

  /// The sums of an item are of numbers that the matrices' factors still have to multiply.
  template <int kTokenTiles>
  static __device__ __forceinline__ void finish(float (&sums)[kTokenTiles][4],
                                                const MatrixScales& scales) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      sums[n][0] *= scales.kept[0];
      sums[n][1] *= scales.kept[0];
      sums[n][2] *= scales.kept[1];
      sums[n][3] *= scales.kept[1];
    }
  }
};

template <>
struct TurnMath<Coded<WeightFormat::kE4M3>> {
  // A turn is one block of scales along the sum.
  static_assert(kTurnUnits * coded::kUnitValues == kE4M3Block);

  template <int kTokenTiles>
  using Sums = CodedSums<kTokenTiles, 1>;

  template <bool kWhole, int kGroups, int kTokenTiles, typename LoadTokens>
  static __device__ __forceinline__ void multiply(Sums<kTokenTiles>& sums,
                                                  const unsigned char* (&codes)[kGroups], int steps,
                                                  int block, BlockScales& scales,
                                                  LoadTokens&& load) {
    CodedSums<kTokenTiles, kChains<kTokenTiles>> part;
#pragma unroll
    for (int step = 0; step < 2 * kTurnUnits; ++step) {
      if (!kWhole && step > 0 && steps <= step) break;
      const int at = step * coded::kE4M3StepBytes;
      uint4 w[2] = {};
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        w[i] = coded::e4m3_numbers(*reinterpret_cast<const uint2*>(codes[i] + at));
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) part.multiply(n, w[0], w[1], load(n, step));
    }
    part.add_chains();
    float upper;
    float lower;
    scales.at(block, upper, lower);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      float(&sum)[4] = sums.chain[0][n];
      sum[0] = fmaf(part.chain[0][n][0], upper, sum[0]);
      sum[1] = fmaf(part.chain[0][n][1], upper, sum[1]);
      sum[2] = fmaf(part.chain[0][n][2], lower, sum[2]);
      sum[3] = fmaf(part.chain[0][n][3], lower, sum[3]);
    }
  }

  template <int kTokenTiles>
  static __device__ __forceinline__ void finish(float (&/*sums*/)[kTokenTiles][4],
                                                const BlockScales& /*scales*/) {}
};

}  // namespace switchyard::streaming
