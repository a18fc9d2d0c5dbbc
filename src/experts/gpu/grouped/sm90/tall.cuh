#pragma once

// What follows the products of a tall tile on Hopper: the sums lie with the weights' rows along the
// lanes and token rows along the registers. Bias, activation and one rounding as in
// grouped_epilogue.cuh; stmatrix turns the values round on their way to shared memory, and 16-byte
// stores bring them out.

#include "core/gpu/ptx.cuh"
#include "core/gpu/swizzle.hpp"
#include "experts/gpu/grouped/epilogue.cuh"
#include "experts/gpu/grouped/schedule.hpp"

namespace switchyard {

/// Where the packed rows of a tile go.
struct RowBlock {
  std::int32_t row = 0;     // in out
  std::int32_t rows = 0;    // 0..64 of a warpgroup; tall: 129..192 of both
  std::int32_t column = 0;  // tall: of the CTA
  bool tall = false;
};

/// One warpgroup's share of a tall tile: 32 gated columns. Of its 64 rows of weights eight gate and
/// eight up ones take turns.
template <typename T>
struct TallTile {
  static constexpr int kColumns = 32;
  static constexpr int kPacked = kTallRows / 16;  // pairs of registers, each for 8 token rows
  static constexpr int kBoxRows = 96;             // that shared memory holds
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kBoxes = kTallRows / kBoxRows;
  static constexpr int kBytes = kBoxRows * kRowBytes;  // of shared memory

  /// Sums of 192 rows, of which the last may mean nothing, to 16-bit pairs of neighbouring rows.
  template <int kSums, int kRoom>
  static __device__ __forceinline__ void pack(const float (&sums)[kSums], uint2 (&packed)[kRoom],
                                              const EpilogueParams& params, std::int32_t expert,
                                              std::int32_t first_column, int group) {
    const std::int32_t column = first_column + group * kColumns +
                                static_cast<std::int32_t>(threadIdx.x / 32 % 4) * 8 +
                                static_cast<std::int32_t>(threadIdx.x % 32 / 4);
    float gate_bias = 0;
    float up_bias = 0;
    if (params.bias != nullptr && column < params.columns) {
      const float* bias = params.bias + static_cast<std::int64_t>(expert) * 2 * params.columns;
      gate_bias = __ldg(bias + column);
      up_bias = __ldg(bias + params.columns + column);
    }
    with_activation(params.activation.kind, [&](auto kind) {
      constexpr Activation kKind = decltype(kind)::value;
      const auto one = [&](int i) {
        return activate<kKind, true>(sums[i] + gate_bias, sums[i + 2] + up_bias, params.activation);
      };
      const auto two = [&](int i) { return pack_two<T>(one(i), one(i + 1)); };
#pragma unroll
      for (int i = 0; i < kPacked; ++i) packed[i] = {two(8 * i), two(8 * i + 4)};
    });
  }

  /// Box number `box` of the rows leaves for memory by way of kBytes at `address`.
  /// All threads of the warpgroup; nobody else uses that memory when it returns.
  template <int kRoom>
  static __device__ __forceinline__ void send(const uint2 (&packed)[kRoom], const RowBlock& block,
                                              const EpilogueParams& params, std::uint32_t address,
                                              int barrier, int group, int box) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
    ptx::named_barrier(barrier, 128);
#pragma unroll
    for (int i = 0; i < kBoxRows / 8; i += 4) {  // four matrices of 8 rows by 8 columns
      const int first = (box * kBoxRows / 8 + i) / 2;
      ptx::stmatrix_x4_transposed(address + swizzled_place<kRowBytes>(8 * i + lane, thread / 32),
                                  packed[first].x, packed[first].y, packed[first + 1].x,
                                  packed[first + 1].y);
    }
    ptx::named_barrier(barrier, 128);
    constexpr int kChunks = kRowBytes / 16;
    const int chunk = thread % kChunks;
    const std::int32_t column = block.column + group * kColumns + chunk * 8;
    const int rows = min(block.rows - box * kBoxRows, kBoxRows);
    if (column < params.columns) {
      const std::int64_t first_row = block.row + box * kBoxRows;
      char* out = static_cast<char*>(params.out) + (first_row * params.columns + column) * 2;
      for (int row = thread / kChunks; row < rows; row += 128 / kChunks) {
        *reinterpret_cast<int4*>(out + static_cast<std::int64_t>(row) * params.columns * 2) =
            ptx::load_shared_16(address + swizzled_place<kRowBytes>(row, chunk));
      }
    }
    ptx::named_barrier(barrier, 128);
  }
};

}  // namespace switchyard
