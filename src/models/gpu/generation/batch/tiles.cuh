#pragma once

// What the products of a batch's rows share: tiles of sums that warps leave for each other.

#include <type_traits>

#include "core/gpu/ptx.cuh"
#include "models/gpu/generation/batch/stages.hpp"
#include "models/gpu/generation/mma_block.cuh"
#include "models/gpu/generation/overlap.cuh"
#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {

inline constexpr int kBatchWarps = 16, kBatchThreads = 32 * kBatchWarps;
inline constexpr int kOutsOfTile = 16;  ///< Rows of weights of a tile,
inline constexpr int kRowsOfTile = 8;   ///< and rows of x.
inline constexpr int kBlockPacks = 4;   ///< Of 32 columns: 16 bytes a lane.

/// Sums of 16 outputs of 8 kTiles rows that a warp leaves, an output beside the next; padded so
/// that neither who leaves nor who fetches them meets another one in a bank.
template <int kTiles>
struct TileSums {
  static constexpr int kStride = kOutsOfTile + 4;
  float sum[kTiles * kRowsOfTile][kStride];

  __device__ __forceinline__ void leave(int tile, const float (&of)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float* const to = sum[tile * kRowsOfTile + 2 * (lane % 4)] + lane / 4;
    to[0] = of[0];
    to[kStride] = of[1];
    to[8] = of[2];
    to[kStride + 8] = of[3];
  }
};

/// Calls `body` with a constant: tiles that hold as many rows.
template <class Body>
__host__ __device__ __forceinline__ void by_tiles(int rows, const Body& body) {
  if (rows <= kRowsOfTile) return body(std::integral_constant<int, 1>{});
  if (rows <= 2 * kRowsOfTile) return body(std::integral_constant<int, 2>{});
  body(std::integral_constant<int, 4>{});
}

}  // namespace switchyard::models::gpu
