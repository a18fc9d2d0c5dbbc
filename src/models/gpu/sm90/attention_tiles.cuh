#pragma once

// Pieces of attention by Hopper's wgmma (bf16, f32 sums). A block is a warpgroup that has 64 rows,
// 16 a warp; tiles of 64 columns' rows stream by. A tile lies in shared memory as boxes of 64 rows
// of 64 numbers (128 bytes), swizzled; the tile begins at a multiple of 1024 bytes.

#include "core/gpu/ptx.cuh"
#include "core/gpu/swizzle.hpp"
#include "core/gpu/wgmma.cuh"
#include "core/gpu/wgmma_registers.cuh"
#include "models/gpu/attention_tiles.cuh"

namespace switchyard::models::gpu::sm90 {

using tiles::head_of;
using tiles::kRows;
using tiles::kThreads;

inline constexpr int kBoxBytes = kRows * 128;
template <int kDim>
inline constexpr int kBoxes = kDim / 64;
template <int kDim>
inline constexpr int kTileBytes = kBoxes<kDim>* kBoxBytes;
inline constexpr std::size_t kTileAlign = 1024;

/// The first place for a tile in a block's dynamic memory, which has kTileAlign bytes more.
__device__ __forceinline__ std::uint32_t first_tile(const void* shared) {
  return (ptx::shared_address(shared) + (kTileAlign - 1)) &
         ~static_cast<std::uint32_t>(kTileAlign - 1);
}

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
    ptx::cp_async_16(
        tile + static_cast<std::uint32_t>(c / 8 * kBoxBytes) + swizzled_place<128>(r, c % 8), from,
        there ? 16 : 0);
  }
}

/// What this thread's copies have brought is there for all threads' wgmma, behind the barrier.
template <int kPending>
__device__ __forceinline__ void wait_for_tiles() {
  ptx::cp_async_wait<kPending>();
  ptx::fence_proxy_async();
  __syncthreads();
}

/// One warp's 16 x 64 sums, as the tensor cores hold them: ptx::wgmma_row() and wgmma_column().
using Sums = float[32];

/// A warp's 16 rows of a tile, as wgmma takes A from registers: [16 of D][4].
template <int kDim>
struct Rows {
  std::uint32_t of[kDim / 16][4];

  __device__ __forceinline__ void load(std::uint32_t tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      ptx::ldmatrix_x4(of[k],
                       tile + static_cast<std::uint32_t>(k / 4 * kBoxBytes) +
                           swizzled_place<128>(16 * warp + lane % 16, k % 4 * 2 + lane / 16));
    }
  }
};

/// Enqueues scores = A X^T, X the 64 rows of tile `x`.
template <int kDim>
__device__ __forceinline__ void multiply_rows(const Rows<kDim>& a, std::uint32_t x, Sums& scores) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const std::uint64_t b = ptx::wgmma_operand(x + static_cast<std::uint32_t>(k / 4 * kBoxBytes)) +
                            static_cast<std::uint64_t>(2 * (k % 4));
    ptx::wgmma_bf16_from_registers<64>(scores, a.of[k], b, k > 0 ? 1U : 0U);
  }
}
/// The same of rows in a tile.
template <int kDim>
__device__ __forceinline__ void multiply_rows(std::uint32_t a, std::uint32_t x, Sums& scores) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const auto box = static_cast<std::uint32_t>(k / 4 * kBoxBytes);
    const auto step = static_cast<std::uint64_t>(2 * (k % 4));
    ptx::wgmma<Bf16, 64>(scores, ptx::wgmma_operand(a + box) + step,
                         ptx::wgmma_operand(x + box) + step, k > 0 ? 1U : 0U);
  }
}

/// 16 x 64 numbers rounded to bf16, as wgmma takes A from registers.
struct Rounded {
  std::uint32_t of[kRows / 16][4];

  __device__ __forceinline__ explicit Rounded(const Sums& p) {
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[k][i] = pack_pair(p[8 * k + 2 * i], p[8 * k + 2 * i + 1], Bf16{});
      }
    }
  }
  /// The registers have these values here: called before the first wgmma that is enqueued and
  /// behind the wait, so that no other value takes their place while a wgmma may still read them.
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      asm volatile("" : "+r"(of[k][0]), "+r"(of[k][1]), "+r"(of[k][2]), "+r"(of[k][3])::"memory");
    }
  }
};

/// Enqueues sums [16 x D] += P Y, Y the 64 rows of tile `y`. P stays until a wait.
template <int kDim>
__device__ __forceinline__ void multiply_columns(const Rounded& p, std::uint32_t y,
                                                 Sums (&sums)[kBoxes<kDim>]) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
#pragma unroll
    for (int box = 0; box < kBoxes<kDim>; ++box) {
      const std::uint64_t b =
          ptx::wgmma_turned_operand(y + static_cast<std::uint32_t>(box * kBoxBytes)) +
          static_cast<std::uint64_t>(k) * ptx::kTurnedStep;
      ptx::wgmma_bf16_from_registers<64, true>(sums[box], p.of[k], b, 1U);
    }
  }
}

/// The warp's 16 rows, each times a factor, to rows [first, first + 64) of a head.
template <int kDim>
__device__ __forceinline__ void store_rows(const Sums (&sums)[kBoxes<kDim>], const float (&by)[2],
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
      const Sums& of = sums[n / 8];
      const int i = 4 * (n % 8) + 2 * h;
      *reinterpret_cast<std::uint32_t*>(to + 8 * n) =
          pack_pair(of[i] * by[h], of[i + 1] * by[h], Bf16{});
    }
  }
}

}  // namespace switchyard::models::gpu::sm90
