#pragma once

// Grouped GEMM of f32 experts for many rows, for sm_80 and everything later; schedule and
// epilogues are those of the 16-bit kernels.
//
// Bound by the tensor cores: each value is split into its upper 11 bits and the exact rest, and
// three of the four products of TF32 are kept, so that about 2^-21 of a product is lost. One CTA of
// 8 warps takes tiles of 128 rows by 128 rows of weights (64 gate and 64 up ones when gated), 64 x
// 32 a warp: 16 columns of each half, so that a gate and its up value meet in one thread. The
// tensor cores truncate as they add: their sums are of 32 values only, the rest is added here.

#include "experts/gpu/grouped/sm80/load.cuh"

namespace switchyard {

constexpr int kF32Threads = 256;
constexpr int kF32Stages = 3;
constexpr int kF32TileN = 128;
constexpr int kF32TileK = 32;  // values: rows of 128 bytes
constexpr int kF32RowBytes = kF32TileK * 4;
constexpr int kF32RowsBytes = kTileRows * kF32RowBytes;
constexpr int kF32StageBytes = kF32RowsBytes + kF32TileN * kF32RowBytes;
constexpr int kF32SharedBytes = kF32Stages * kF32StageBytes;  // 96 KB: every chip since sm_80

/// Where 16-byte chunk `chunk` of a row lies: two neighbouring rows' halves meet all banks.
__device__ __forceinline__ std::uint32_t f32_place(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kF32RowBytes + ((chunk ^ (row % 2 * 4)) << 4));
}

/// Where one tile's operands come from; a thread brings one chunk of every 32nd row.
template <bool kGated>
class F32Loader {
 public:
  __device__ F32Loader(const Sm80Params& params, const Work& work, std::uint32_t shared)
      : params_(params), shared_(shared) {
    const int row = static_cast<int>(threadIdx.x / 8);
    const std::int64_t depth = params.depth;
    const std::int32_t columns = params.epilogue.columns;
    const std::int32_t first = work.tile.column_tile * (kGated ? kF32TileN / 2 : kF32TileN);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Rows past the last repeat it and are never stored; likewise columns.
      const std::int32_t at = work.tile.row + min(row + 32 * i, work.tile.rows - 1);
      const std::int64_t token = params.row_token == nullptr ? at : params.row_token[at];
      rows_[i] = static_cast<const float*>(params.rows) + token * depth;
      const std::int32_t column = first + row + 32 * (kGated ? i % 2 : i);
      const std::int64_t weight = std::int64_t{work.expert} * params.weight_rows +
                                  min(column, columns - 1) + (kGated && i >= 2 ? columns : 0);
      weights_[i] = static_cast<const float*>(params.weights) + weight * depth;
    }
  }

  /// The 32 values of every row and weight from `step` on; zeros past the end.
  __device__ __forceinline__ void load(int step, int num_steps) const {
    if (step < num_steps) {
      const int chunk = static_cast<int>(threadIdx.x % 8);
      const int row = static_cast<int>(threadIdx.x / 8);
      const std::int32_t k = step * kF32TileK + chunk * 4;
      const bool inside = k < params_.depth;
      const std::uint32_t bytes = inside ? 16 : 0;
      const std::int32_t from = inside ? k : 0;
      const std::uint32_t to = shared_ +
                               static_cast<std::uint32_t>(step % kF32Stages * kF32StageBytes) +
                               f32_place(row, chunk);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::cp_async_16(to + i * 32 * kF32RowBytes, rows_[i] + from, bytes);
        ptx::cp_async_16(to + kF32RowsBytes + i * 32 * kF32RowBytes, weights_[i] + from, bytes);
      }
    }
    ptx::cp_async_commit();
  }

 private:
  const Sm80Params& params_;
  std::uint32_t shared_;
  const float* rows_[4];
  const float* weights_[4];
};

/// Four values of a row as the two TF32 terms of each.
struct F32Terms {
  std::uint32_t high[4];
  std::uint32_t low[4];

  __device__ __forceinline__ void load(std::uint32_t from) {
    const int4 four = ptx::load_shared_16(from);
    const int values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto value = static_cast<std::uint32_t>(values[i]);
      high[i] = value & 0xffffe000U;
      low[i] = __float_as_uint(__uint_as_float(value) - __uint_as_float(high[i]));
    }
  }
};

/// Row of weights in the tile at which column block `n` of a warp begins.
__device__ __forceinline__ int f32_weight_row(int warp_n, int n) {
  return n / 2 * (kF32TileN / 2) + warp_n * 16 + n % 2 * 8;
}

/// sums[m][n] is the m16n8 block of rows 16m.. and column block n of the warp.
using F32Sums = float[4][4][4];

/// Adds the products of one stage. The instruction would hand a lane other values of the sum's
/// index than the four that lie together, but both operands permute it alike.
__device__ __forceinline__ void multiply_f32(F32Sums& sums, std::uint32_t stage, int warp_m,
                                             int warp_n) {
  constexpr int kHalves = kF32TileK / 16;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int group = lane / 4;
  F32Terms weights[kHalves][4];
#pragma unroll
  for (int s = 0; s < kHalves; ++s) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      weights[s][n].load(stage + kF32RowsBytes +
                         f32_place(f32_weight_row(warp_n, n) + group, 4 * s + lane % 4));
    }
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int row = warp_m * 64 + m * 16 + group;
    float part[4][4] = {};
#pragma unroll
    for (int s = 0; s < kHalves; ++s) {
      F32Terms upper;
      F32Terms lower;
      upper.load(stage + f32_place(row, 4 * s + lane % 4));
      lower.load(stage + f32_place(row + 8, 4 * s + lane % 4));
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const std::uint32_t high[4] = {upper.high[k], lower.high[k], upper.high[k + 1],
                                       lower.high[k + 1]};
        const std::uint32_t low[4] = {upper.low[k], lower.low[k], upper.low[k + 1],
                                      lower.low[k + 1]};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          ptx::mma_tf32(part[n], low, weights[s][n].high[k], weights[s][n].high[k + 1]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          ptx::mma_tf32(part[n], high, weights[s][n].low[k], weights[s][n].low[k + 1]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          ptx::mma_tf32(part[n], high, weights[s][n].high[k], weights[s][n].high[k + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = __fadd_rn(sums[m][n][i], part[n][i]);
    }
  }
}

/// Bias, activation and stores of one warp's sums.
template <Epilogue kEpilogue>
__device__ __forceinline__ void store_f32(const F32Sums& sums, const Work& work, int warp_m,
                                          int warp_n, const EpilogueParams& params,
                                          [[maybe_unused]] void* preactivation) {
  constexpr bool kGated = is_gated(kEpilogue);
  constexpr int kBlocks = kGated ? 2 : 4;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int32_t first = work.tile.column_tile * (kGated ? kF32TileN / 2 : kF32TileN);
  const float* const bias =
      params.bias == nullptr
          ? nullptr
          : params.bias + std::int64_t{work.expert} * params.columns * (kGated ? 2 : 1);
  const auto store = [&](auto kind) {
    [[maybe_unused]] constexpr Activation kKind = decltype(kind)::value;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const std::int32_t column = first + f32_weight_row(warp_n, n) + lane % 4 * 2;
      if (column >= params.columns) continue;
      float2 b = {0, 0};
      float2 up_b = {0, 0};
      if (bias != nullptr) {
        b = *reinterpret_cast<const float2*>(bias + column);
        if (kGated) up_b = *reinterpret_cast<const float2*>(bias + params.columns + column);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const std::int32_t row = warp_m * 64 + m * 16 + lane / 4 + 8 * h;
          if (row >= work.tile.rows) continue;
          float v0 = sums[m][n][2 * h] + b.x;
          float v1 = sums[m][n][2 * h + 1] + b.y;
          if constexpr (keeps_preactivation(kEpilogue)) {
            float* const before =
                static_cast<float*>(preactivation) +
                std::int64_t{work.tile.row + row} * params.columns * (kGated ? 2 : 1) + column;
            *reinterpret_cast<float2*>(before) = {v0, v1};
            if constexpr (kGated) {
              *reinterpret_cast<float2*>(before + params.columns) = {
                  sums[m][n + 2][2 * h] + up_b.x, sums[m][n + 2][2 * h + 1] + up_b.y};
            }
          }
          if constexpr (kGated) {
            v0 = activate<kKind, true>(v0, sums[m][n + 2][2 * h] + up_b.x, params.activation);
            v1 = activate<kKind, true>(v1, sums[m][n + 2][2 * h + 1] + up_b.y, params.activation);
          } else if constexpr (is_plain(kEpilogue)) {
            v0 = activate<kKind, false>(v0, 0.0F, params.activation);
            v1 = activate<kKind, false>(v1, 0.0F, params.activation);
          }
          const std::int64_t at = std::int64_t{work.tile.row + row} * params.columns + column;
          *reinterpret_cast<float2*>(static_cast<float*>(params.out) + at) = {v0, v1};
        }
      }
    }
  };
  if constexpr (kEpilogue == Epilogue::kLinear) {
    store(std::integral_constant<Activation, Activation::kSilu>{});
  } else {
    with_activation(params.activation.kind, store);
  }
}

template <Epilogue kEpilogue>
__global__ void __launch_bounds__(kF32Threads, 1)
    grouped_gemm_f32(const __grid_constant__ Sm80Params params) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int4 ring[kRingSlots];
  const std::uint32_t base = ptx::shared_address(shared);
  const int warp_m = static_cast<int>(threadIdx.x / 32 % 2);
  const int warp_n = static_cast<int>(threadIdx.x / 64);
  const int num_steps = (params.depth + kF32TileK - 1) / kF32TileK;
  UnitWalk<2> walk(params.schedule, static_cast<std::int32_t>(blockIdx.x),
                   static_cast<std::int32_t>(gridDim.x));
  for (std::uint32_t index = 0;; ++index) {
    if (threadIdx.x < 32) write_work(walk, ring, index);
    __syncthreads();  // also: nobody reads the stages of the last tile any more
    const Work work = read_work(ring, index);
    if (work.expert < 0) return;
    const F32Loader<is_gated(kEpilogue)> loader(params, work, base);
#pragma unroll
    for (int step = 0; step < kF32Stages - 1; ++step) loader.load(step, num_steps);
    const bool has_rows = work.tile.rows > warp_m * 64;
    F32Sums sums = {};
    for (int step = 0; step < num_steps; ++step) {
      ptx::cp_async_wait<kF32Stages - 2>();
      __syncthreads();
      loader.load(step + kF32Stages - 1, num_steps);
      if (has_rows) {
        const auto stage = static_cast<std::uint32_t>(step % kF32Stages * kF32StageBytes);
        multiply_f32(sums, base + stage, warp_m, warp_n);
      }
    }
    ptx::cp_async_wait<0>();
    if (has_rows) {
      store_f32<kEpilogue>(sums, work, warp_m, warp_n, params.epilogue, params.preactivation);
    }
  }
}

}  // namespace switchyard
