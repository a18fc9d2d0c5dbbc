#pragma once

// The eight warps that multiply what is in the ring, and the one that adds up their shares.

#include <cstdint>
#include <type_traits>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/streaming/coded.cuh"
#include "experts/gpu/streaming/math.cuh"
#include "experts/gpu/streaming/ring.cuh"

namespace switchyard::streaming {

__device__ __forceinline__ uint4 load_16(const unsigned char* from) {
  return *reinterpret_cast<const uint4*>(from);
}

/// Calls run(std::integral_constant<int, tiles>) with the least tiles of 8 tokens that take them.
template <int kMaxTokenTiles, typename Run>
__device__ __forceinline__ void with_token_tiles(int token_rows, Run&& run) {
  if (token_rows <= 8) {
    run(std::integral_constant<int, 1>{});
  } else if (token_rows <= 16) {
    run(std::integral_constant<int, 2>{});
  } else if (kMaxTokenTiles == 4 || token_rows <= 32) {
    run(std::integral_constant<int, 4>{});
  } else if constexpr (kMaxTokenTiles == 8) {
    if (token_rows <= 48) {
      run(std::integral_constant<int, 6>{});
    } else {
      run(std::integral_constant<int, 8>{});
    }
  }
}

/// What a consumer warp keeps from item to item.
template <typename Crew>
struct Consumer {
  const Ring& ring;
  int row_bytes;
  float4* parts;  // [kPartBuffers][Crew::kConsumers][32]
  Cursor cursor;
  Cursor part;

  /// The sums of one item for kTokenTiles tiles of tokens. `row0`, `row1`: weight rows of the stage
  /// that this lane holds. kSplit warps share K; this one takes the steps s with s % kSplit ==
  /// share.
  template <typename T, int kTokenTiles, int kBatch, int kSplit>
  __device__ __forceinline__ void multiply(float (&sums)[kTokenTiles][4], int share, int row0,
                                           int row1, int token_rows, const Chunks& chunks) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int column = lane % 4 * 16;
    const int total = (row_bytes + kStepBytes - 1) / kStepBytes;
    const int steps_of_piece = chunks.piece / kStepBytes;
    const int offset0 = row0 * chunks.piece + column;
    const int offset1 = row1 * chunks.piece + column;
    int token_offset[kTokenTiles];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      // Columns past the last token repeat it; their sums are never stored.
      token_offset[n] =
          chunks.tokens_at + min(8 * n + lane / 4, token_rows - 1) * chunks.token_stride + column;
    }
    for (int before = 0; before < total; before += steps_of_piece) {
      const int steps = min(steps_of_piece, total - before);
      ptx::mbarrier_wait(ring.full(cursor.slot), cursor.phase);
      const unsigned char* stage = ring.memory + cursor.slot * ring.stage_bytes;
#pragma unroll(kTokenTiles == 1 ? 2 : 1)
      for (int s = (share - before) & (kSplit - 1); s < steps; s += kSplit) {
        const unsigned char* at = stage + s * kStepBytes;
        const uint4 w0 = load_16(at + offset0);
        const uint4 w1 = load_16(at + offset1);
        StepMath<T>::template multiply<kTokenTiles, kBatch>(
            sums, w0, w1, [&](int n) { return load_16(at + token_offset[n]); });
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ring.empty(cursor.slot));
      cursor.advance(ring.num_stages);
    }
  }

  /// Lets an item pass that other warps work on. Without the wait this warp could meet a barrier
  /// two phases on, which looks like none.
  __device__ __forceinline__ void skip(int chunks) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ptx::mbarrier_wait(ring.full(cursor.slot), cursor.phase);
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ring.empty(cursor.slot));
      cursor.advance(ring.num_stages);
    }
  }

  /// Hands this warp's share of the sums to the finish warp.
  template <int kTokenTiles>
  __device__ __forceinline__ void hand_over(const float (&sums)[kTokenTiles][4], int token_rows) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      if (8 * n < token_rows) {
        ptx::mbarrier_wait(ring.part_empty(part.slot), part.phase ^ 1);
        parts[(part.slot * Crew::kConsumers + warp) * 32 + lane] =
            make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ring.part_full(part.slot));
        part.advance(kPartBuffers);
      }
    }
  }

  /// One item; `done(sums)` gets the float[tiles of tokens][4]. `kMaxTokenTiles`: 4, or 8 where a
  /// block has the registers of an SM to itself.
  template <typename W, int kSplit, int kMaxTokenTiles, typename Done>
  __device__ __forceinline__ void item(int share, int row0, int row1, int token_rows,
                                       const Chunks& chunks, Done&& done) {
    using T = TokenOf<W>;
    // f32 keeps twice the operands: one tile at a time where two blocks share the registers.
    constexpr int kBatch = kMaxTokenTiles == 4 ? (sizeof(T) == 4 ? 1 : 2) : 4;
    const auto run = [&]<int kTokenTiles>(std::integral_constant<int, kTokenTiles>) {
      float sums[kTokenTiles][4] = {};
      constexpr int kAtOnce = kBatch < kTokenTiles
                                  ? (kTokenTiles % kBatch == 0 ? kBatch : kTokenTiles / 2)
                                  : kTokenTiles;
      multiply<T, kTokenTiles, kAtOnce, kSplit>(sums, share, row0, row1, token_rows, chunks);
      done(sums);
    };
    with_token_tiles<kMaxTokenTiles>(token_rows, run);
  }
};

/// Takes the sums of an item out of the buffers, in the order the consumers put them there.
template <typename Crew>
struct Finisher {
  const Ring& ring;
  const float4* parts;
  Cursor part;

  /// Calls `store(tile, first_token, sum)` for each tile of weight rows; `sum` as the lane's four
  /// accumulators of a 16 x 8 tile: rows (g, g, g + 8, g + 8), tokens (2t, 2t + 1, 2t, 2t + 1).
  template <int kSplit, typename Store>
  __device__ __forceinline__ void item(int token_rows, Store&& store) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int first = 0; first < token_rows; first += 8) {
      ptx::mbarrier_wait(ring.part_full(part.slot), part.phase);
      const float4* of = parts + part.slot * Crew::kConsumers * 32 + lane;
#pragma unroll
      for (int tile = 0; tile < Crew::kConsumers / kSplit; ++tile) {
        float4 sum = of[tile * kSplit * 32];
#pragma unroll
        for (int k = 1; k < kSplit; ++k) {
          const float4 more = of[(tile * kSplit + k) * 32];
          sum.x += more.x;
          sum.y += more.y;
          sum.z += more.z;
          sum.w += more.w;
        }
        store(tile, first, sum);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ring.part_empty(part.slot));
      part.advance(kPartBuffers);
    }
  }
};

}  // namespace switchyard::streaming
