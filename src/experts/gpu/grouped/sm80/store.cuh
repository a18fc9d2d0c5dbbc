#pragma once

// The portable grouped GEMM's sums on their way to memory: bias, activation, rounding. Each thread
// stores 16 bytes of a row, four of them 64.

#include "experts/gpu/grouped/epilogue.cuh"
#include "experts/gpu/grouped/scheduler.cuh"

namespace switchyard {

/// One warp's 64 x 64 sums: sums[m][n] is the m16n8 block of rows 16m.. and column block n; blocks
/// 0..3 are 32 columns of the tile's first half, 4..7 the same ones of its second. Of the 32, lane
/// q of four has columns 8q + 2n and the next in blocks n and n + 4; rows as Sm80Operands says.
using Sm80Sums = float[4][8][4];

/// One warp's sums before the activation. Two halves of a gated tile are the same columns, of a
/// plain one 128 apart.
template <typename T, bool kGated>
__device__ __forceinline__ void store_preactivation(const Sm80Sums& sums, std::int32_t first_row,
                                                    std::int32_t rows_end,
                                                    std::int32_t first_column, std::int32_t columns,
                                                    void* out) {
  const std::int64_t stride = std::int64_t{columns} * (kGated ? 2 : 1);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int32_t row = first_row + m / 2 * 32 + m % 2 * 4 + h * 2;
        const std::int32_t column = first_column + (kGated ? 0 : half * 128);
        if (row >= rows_end || column >= columns) continue;
        std::uint32_t v[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          v[n] = pack_two<T>(sums[m][half * 4 + n][2 * h], sums[m][half * 4 + n][2 * h + 1]);
        }
        const std::int64_t at = row * stride + column + (kGated ? half * columns : 0);
        *reinterpret_cast<uint4*>(static_cast<char*>(out) + at * 2) = {v[0], v[1], v[2], v[3]};
      }
    }
  }
}

/// Bias, activation, rounding and stores of one warp's sums.
template <typename T, Epilogue kEpilogue>
__device__ __forceinline__ void store_sums(Sm80Sums& sums, const Work& work, int warp_m, int warp_n,
                                           const EpilogueParams& params,
                                           [[maybe_unused]] void* preactivation) {
  constexpr bool kGated = is_gated(kEpilogue);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int32_t first_column =
      work.tile.column_tile * (kGated ? 128 : 256) + warp_n * 32 + lane % 4 * 8;
  const std::int32_t row = work.tile.row + warp_m * 64 + lane / 8 * 8 + lane / 4 % 2;
  const std::int32_t rows_end = work.tile.row + work.tile.rows;
  if (params.bias != nullptr) {
    const float* bias =
        params.bias + static_cast<std::int64_t>(work.expert) * params.columns * (kGated ? 2 : 1);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const std::int32_t in_half = first_column + n % 4 * 2;
      const std::int32_t column = !kGated && n >= 4 ? in_half + 128 : in_half;
      if (column >= params.columns) continue;
      const float2 b = __ldg(
          reinterpret_cast<const float2*>(bias + column + (kGated && n >= 4 ? params.columns : 0)));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        sums[m][n][0] += b.x;
        sums[m][n][1] += b.y;
        sums[m][n][2] += b.x;
        sums[m][n][3] += b.y;
      }
    }
  }
  if constexpr (keeps_preactivation(kEpilogue)) {
    store_preactivation<T, kGated>(sums, row, rows_end, first_column, params.columns,
                                   preactivation);
  }
  const auto store = [&](auto kind) {
    [[maybe_unused]] constexpr Activation kKind = decltype(kind)::value;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int half = 0; half < (kGated ? 1 : 2); ++half) {
          std::uint32_t v[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float v0 = sums[m][half * 4 + n][2 * h];
            float v1 = sums[m][half * 4 + n][2 * h + 1];
            if constexpr (kGated) {
              v0 = activate<kKind, true>(v0, sums[m][n + 4][2 * h], params.activation);
              v1 = activate<kKind, true>(v1, sums[m][n + 4][2 * h + 1], params.activation);
            } else if constexpr (is_plain(kEpilogue)) {
              v0 = activate<kKind, false>(v0, 0.0F, params.activation);
              v1 = activate<kKind, false>(v1, 0.0F, params.activation);
            }
            v[n] = pack_two<T>(v0, v1);
          }
          const std::int32_t to_row = row + m / 2 * 32 + m % 2 * 4 + h * 2;
          const std::int32_t to_column = first_column + half * 128;
          if (to_row < rows_end && to_column < params.columns) {
            const std::int64_t at = static_cast<std::int64_t>(to_row) * params.columns + to_column;
            *reinterpret_cast<uint4*>(static_cast<char*>(params.out) + at * 2) = {v[0], v[1], v[2],
                                                                                  v[3]};
          }
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

}  // namespace switchyard
