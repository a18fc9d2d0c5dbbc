#pragma once

// Pieces of attention by tensor cores (mma.sync m16n8k16, bf16, f32 sums). A block of four warps
// has 64 rows, 16 a warp; tiles of 64 columns' rows stream by. Tiles lie in shared memory row by
// row, 16 bytes apart from each other, so that ldmatrix meets no bank twice.

#include "core/gpu/ptx.cuh"
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu::tiles {

inline constexpr int kRows = 64;        // of a tile
inline constexpr int kThreads = 128;    // four warps of 16 rows
inline constexpr int kColumnTiles = 8;  // of 8 columns

template <int kDim>
inline constexpr int kStride = kDim + 8;  // elements
template <int kDim>
inline constexpr int kTileBytes = kRows* kStride<kDim> * 2;

/// Rows [first, first + 64) of a head, those from `positions` on as zeros.
template <int kDim>
__device__ __forceinline__ void load_tile(std::uint32_t tile, const Bf16* rows, std::int64_t row,
                                          int first, std::int64_t positions) {
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, c = i % kChunks;
    const bool there = first + r < positions;
    const Bf16* const from = rows + (there ? (first + r) * row : 0) + 8 * c;
    ptx::cp_async_16(tile + static_cast<std::uint32_t>((r * kStride<kDim> + 8 * c) * 2), from,
                     there ? 16 : 0);
  }
}

/// One warp's 16 x 64 sums, as the tensor cores hold them: [column tile][4].
using Scores = float[kColumnTiles][4];

/// scores = A X^T, A the warp's 16 rows of `a`, X the 64 rows of `x`.
template <int kDim>
__device__ __forceinline__ void multiply_rows(std::uint32_t a, std::uint32_t x, Scores& scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
    for (int i = 0; i < 4; ++i) scores[n][i] = 0;
  }
  const std::uint32_t of_a =
      a +
      static_cast<std::uint32_t>(((16 * warp + lane % 16) * kStride<kDim> + (lane / 16) * 8) * 2);
  const std::uint32_t of_x =
      x + static_cast<std::uint32_t>(
              ((lane % 8 + (lane / 16) * 8) * kStride<kDim> + ((lane / 8) % 2) * 8) * 2);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    std::uint32_t left[4];
    ptx::ldmatrix_x4(left, of_a + 32 * k);
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      std::uint32_t right[4];
      ptx::ldmatrix_x4(right,
                       of_x + static_cast<std::uint32_t>(n * 8 * kStride<kDim> * 2) + 32 * k);
      ptx::mma_bf16(scores[n], left, right[0], right[1]);
      ptx::mma_bf16(scores[n + 1], left, right[2], right[3]);
    }
  }
}

/// sums [16 x D] += P Y, P the warp's 16 x 64 numbers rounded to bf16, Y the 64 rows of `y`.
template <int kDim>
__device__ __forceinline__ void multiply_columns(const Scores& p, std::uint32_t y,
                                                 float (&sums)[kDim / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t of_y =
      y + static_cast<std::uint32_t>(
              ((lane % 8 + ((lane / 8) % 2) * 8) * kStride<kDim> + (lane / 16) * 8) * 2);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    const std::uint32_t left[4] = {pack_pair(p[2 * k][0], p[2 * k][1], Bf16{}),
                                   pack_pair(p[2 * k][2], p[2 * k][3], Bf16{}),
                                   pack_pair(p[2 * k + 1][0], p[2 * k + 1][1], Bf16{}),
                                   pack_pair(p[2 * k + 1][2], p[2 * k + 1][3], Bf16{})};
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      std::uint32_t right[4];
      ptx::ldmatrix_x4_transposed(
          right, of_y + static_cast<std::uint32_t>((16 * k * kStride<kDim> + 8 * n) * 2));
      ptx::mma_bf16(sums[n], left, right[0], right[1]);
      ptx::mma_bf16(sums[n + 1], left, right[2], right[3]);
    }
  }
}

/// The warp's 16 rows, each times a factor, to rows [first, first + 64) of a head.
template <int kDim>
__device__ __forceinline__ void store_rows(const float (&sums)[kDim / 8][4], const float (&by)[2],
                                           Bf16* rows, std::int64_t row, int first,
                                           std::int64_t positions) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = first + 16 * warp + lane / 4 + 8 * h;
    if (r >= positions) continue;
    Bf16* const to = rows + r * row + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<std::uint32_t*>(to + 8 * n) =
          pack_pair(sums[n][2 * h] * by[h], sums[n][2 * h + 1] * by[h], Bf16{});
    }
  }
}

/// The head's first row.
__device__ __forceinline__ Bf16* head_of(const Heads& heads, std::int64_t sequence, int head,
                                         int dim, std::int64_t positions) {
  return static_cast<Bf16*>(heads.data) + sequence * positions * heads.row + head * dim;
}

}  // namespace switchyard::models::gpu::tiles
