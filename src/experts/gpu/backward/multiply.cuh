#pragma once

// The products of one stage on the way back, by mma.sync: each of eight warps has 64 x 32 of a tile
// of 128 x 128. In f32 all four products of the values' two TF32 terms, so that about 2^-22 of a
// product is lost (sums over a few rows show it), and few sums inside of the tensor cores, which
// truncate.

#include "experts/gpu/backward/operands.cuh"

namespace switchyard::backward {

/// sums[m][n]: the m16n8 block of rows 16m.. and columns 8n.. of the warp.
using Sums = float[4][4][4];

struct WarpPlace {
  int row;
  int column;
};
__device__ __forceinline__ WarpPlace warp_place() {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return {warp % 2 * 64, warp / 2 * 32};
}

template <typename T>
__device__ __forceinline__ void multiply_16(float (&sums)[4], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    ptx::mma_bf16(sums, a, b0, b1);
  } else {
    ptx::mma_f16(sums, a, b0, b1);
  }
}

/// Adds what one stage has; `left` deep or flat, `right` flat.
template <typename T, bool kDeep>
__device__ __forceinline__ void multiply(Sums& sums, std::uint32_t left, std::uint32_t right) {
  using Shape = Tiles<T>;
  const WarpPlace warp = warp_place();
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < Shape::kTileK; k += 16) {
    std::uint32_t b[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = k + lane % 16;
      const int column = warp.column + 16 * n + lane / 16 * 8;
      ptx::ldmatrix_x4_transposed(
          b[n], right + static_cast<std::uint32_t>(row * Shape::kFlatRowBytes + column * 2));
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      std::uint32_t a[4];
      const int first = warp.row + 16 * m;
      if constexpr (kDeep) {
        const int row = first + lane % 16;
        ptx::ldmatrix_x4(a, left + static_cast<std::uint32_t>(row * Shape::kDeepRowBytes +
                                                              (k + lane / 16 * 8) * 2));
      } else {
        const int row = k + lane % 8 + lane / 16 * 8;
        const int column = first + lane / 8 % 2 * 8;
        ptx::ldmatrix_x4_transposed(
            a, left + static_cast<std::uint32_t>(row * Shape::kFlatRowBytes + column * 2));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        multiply_16<T>(sums[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

/// A value as its two TF32 terms, each the nearest: 2^-23 of it is lost at most.
struct Terms {
  std::uint32_t high;
  std::uint32_t low;
  __device__ __forceinline__ void load(std::uint32_t from) {
    const float value = __uint_as_float(ptx::load_shared_4(from));
    const float nearest = ptx::round_tf32(value);
    high = __float_as_uint(nearest);
    low = __float_as_uint(ptx::round_tf32(value - nearest));
  }
};

template <bool kDeep>
__device__ __forceinline__ void multiply_f32(Sums& sums, std::uint32_t left, std::uint32_t right) {
  using Shape = Tiles<float>;
  constexpr int kSpans = Shape::kTileK / 8;
  const WarpPlace warp = warp_place();
  const int group = static_cast<int>(threadIdx.x) % 32 / 4;
  const int quad = static_cast<int>(threadIdx.x) % 4;
  const auto flat = [](std::uint32_t from, int k, int column) {
    return from + static_cast<std::uint32_t>(k * Shape::kFlatRowBytes + column * 4);
  };
  Terms b[kSpans][4][2];
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[s][n][i].load(flat(right, 8 * s + 4 * i + quad, warp.column + 8 * n + group));
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    std::uint32_t high[kSpans][4];
    std::uint32_t low[kSpans][4];
#pragma unroll
    for (int s = 0; s < kSpans; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp.row + 16 * m + group + i % 2 * 8;
        const int k = 8 * s + quad + i / 2 * 4;
        Terms a;
        a.load(kDeep ? left + static_cast<std::uint32_t>(row * Shape::kDeepRowBytes + k * 4)
                     : flat(left, k, row));
        high[s][i] = a.high;
        low[s][i] = a.low;
      }
    }
    // Small products first: what is truncated of them is small as well.
    float part[4][4] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int s = 0; s < kSpans; ++s) {
        ptx::mma_tf32(part[n], low[s], b[s][n][0].low, b[s][n][1].low);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int s = 0; s < kSpans; ++s) {
        ptx::mma_tf32(part[n], low[s], b[s][n][0].high, b[s][n][1].high);
        ptx::mma_tf32(part[n], high[s], b[s][n][0].low, b[s][n][1].low);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int s = 0; s < kSpans; ++s) {
        ptx::mma_tf32(part[n], high[s], b[s][n][0].high, b[s][n][1].high);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = __fadd_rn(sums[m][n][i], part[n][i]);
    }
  }
}

/// All steps of a tile: sums over `steps` stages. Nobody reads `shared` any more when it returns.
template <typename T, typename Left, typename Right>
__device__ __forceinline__ void multiply_tile(Sums& sums, std::uint32_t shared, int steps,
                                              Left& left, Right& right) {
  constexpr std::uint32_t kStageBytes = Left::kBytes + Right::kBytes;
  constexpr bool kDeep = std::is_same_v<Left, DeepLoader<T>>;
  const auto load = [&](int step) {
    if (step < steps) {
      const std::uint32_t to = shared + static_cast<std::uint32_t>(step % kStages) * kStageBytes;
      left.load(to);
      right.load(to + Left::kBytes);
    }
    ptx::cp_async_commit();
  };
#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step) load(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);
    const std::uint32_t from = shared + static_cast<std::uint32_t>(step % kStages) * kStageBytes;
    if constexpr (Tiles<T>::kIsF32) {
      multiply_f32<kDeep>(sums, from, from + Left::kBytes);
    } else {
      multiply<T, kDeep>(sums, from, from + Left::kBytes);
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
}

/// A tile on its way out: rows of kTile sums, a chunk of columns a thread.
template <typename T>
struct TileRows {
  static constexpr int kStride = kTile + 4;
  static constexpr int kBytes = kTile * kStride * 4;
  static constexpr int kChunks = kTile / kPack<T>;
  static constexpr int kRowsAtOnce = kThreads / kChunks;

  /// The sums to shared memory, for all threads.
  static __device__ __forceinline__ void put(float* shared, const Sums& sums) {
    const WarpPlace warp = warp_place();
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* to = shared + (warp.row + 16 * m + 8 * h + lane / 4) * kStride + warp.column +
                      8 * n + lane % 4 * 2;
          *reinterpret_cast<float2*>(to) = {sums[m][n][2 * h], sums[m][n][2 * h + 1]};
        }
      }
    }
    __syncthreads();
  }

  /// body(row, column, values) for every row in turn; all threads of a row's chunks are in one
  /// warp and come together.
  template <typename Body>
  static __device__ __forceinline__ void each(const float* shared, Body&& body) {
    const int column = static_cast<int>(threadIdx.x) % kChunks * kPack<T>;
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x) / kChunks; row < kTile; row += kRowsAtOnce) {
      float values[kPack<T>];
#pragma unroll
      for (int i = 0; i < kPack<T>; i += 4) {
        const auto four = *reinterpret_cast<const float4*>(shared + row * kStride + column + i);
        values[i] = four.x;
        values[i + 1] = four.y;
        values[i + 2] = four.z;
        values[i + 3] = four.w;
      }
      body(row, column, values);
    }
  }
};

/// Bytes of dynamic shared memory of a kernel that multiplies such operands.
template <typename T, typename Left>
constexpr int shared_bytes() {
  constexpr int kAll = kStages * (Left::kBytes + FlatLoader<T>::kBytes);
  return kAll > TileRows<T>::kBytes ? kAll : TileRows<T>::kBytes;
}

}  // namespace switchyard::backward
