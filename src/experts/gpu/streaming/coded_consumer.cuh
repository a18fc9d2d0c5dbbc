#pragma once

// What the consumer warps and the finish warp do where weights are codes.

#include <type_traits>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/streaming/coded.cuh"
#include "experts/gpu/streaming/consumer.cuh"

namespace switchyard::streaming {

/// A warp's groups of 8 rows in a stage, upper and lower of each of its tiles, and their scales.
template <typename W, int kRowTiles>
struct CodedRows {
  int group[2 * kRowTiles];
  ScalesOf<W> scales[kRowTiles];
};

/// Adds a warp's turns of one item: turn t belongs to the warp with t % kSplit == share.
template <typename W, int kRowTiles, int kTokenTiles, int kSplit>
__device__ __forceinline__ void multiply_coded(Consumer& consumer,
                                               CodedSums<kRowTiles, kTokenTiles>& sums, int share,
                                               CodedRows<W, kRowTiles>& rows, int token_rows,
                                               const Chunks& chunks) {
  constexpr int kTurnBytes = kTurnUnits * Weights<W>::kUnitBytes;
  constexpr int kTurnSteps = 2 * kTurnUnits;
  const Ring& ring = consumer.ring;
  Cursor& cursor = consumer.cursor;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int steps = (consumer.row_bytes + kStepBytes - 1) / kStepBytes;
  const int total = (consumer.row_bytes + kTurnTokenBytes - 1) / kTurnTokenBytes;
  const int turns_of_piece = chunks.piece / kTurnTokenBytes;
  int offset[2 * kRowTiles];
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    offset[i] = rows.group[i] * group_stride<W>(chunks.piece) + lane_place<Weights<W>::kFormat>();
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) rows.scales[m].fetch();
  int token_offset[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    token_offset[n] = chunks.tokens_at +
                      min(8 * n + lane / 4, token_rows - 1) * chunks.token_stride + lane % 4 * 16;
  }
  for (int before = 0; before < total; before += turns_of_piece) {
    const int turns = min(turns_of_piece, total - before);
    ptx::mbarrier_wait(ring.full(cursor.slot), cursor.phase);
    const unsigned char* stage = ring.memory + cursor.slot * ring.stage_bytes;
    const auto turn = [&]<bool kWhole>(std::bool_constant<kWhole>, int t, int steps_left) {
      const unsigned char* codes[2 * kRowTiles];
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) codes[i] = stage + t * kTurnBytes + offset[i];
      const unsigned char* tokens = stage + t * kTurnTokenBytes;
      TurnMath<W>::template multiply<kWhole, kRowTiles, kTokenTiles>(
          sums, codes, steps_left, before + t, rows.scales,
          [&](int n, int step) { return load_16(tokens + step * kStepBytes + token_offset[n]); });
    };
    int t = (share - before) & (kSplit - 1);
    // All but the row's last turn without a question in between.
    const int whole = min(turns, steps / kTurnSteps - before);
    for (; t < whole; t += kSplit) turn(std::true_type{}, t, kTurnSteps);
    if (t < turns) turn(std::false_type{}, t, steps - (before + t) * kTurnSteps);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ring.empty(cursor.slot));
    cursor.advance(ring.num_stages);
  }
  sums.add_chains();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    TurnMath<W>::template finish<kTokenTiles>(sums.chain[0][m], rows.scales[m]);
  }
}

/// One item, whose sums are handed to the finish warp: tile by tile of the warp's weight rows.
template <typename W, int kRowTiles, int kSplit, int kMaxTokenTiles>
__device__ __forceinline__ void coded_item(Consumer& consumer, int share,
                                           CodedRows<W, kRowTiles>& rows, int token_rows,
                                           const Chunks& chunks) {
  with_token_tiles<kMaxTokenTiles>(token_rows,
                                   [&]<int kTokenTiles>(std::integral_constant<int, kTokenTiles>) {
                                     CodedSums<kRowTiles, kTokenTiles> sums;
                                     multiply_coded<W, kRowTiles, kTokenTiles, kSplit>(
                                         consumer, sums, share, rows, token_rows, chunks);
#pragma unroll
                                     for (int m = 0; m < kRowTiles; ++m)
                                       consumer.hand_over(sums.chain[0][m], token_rows);
                                   });
}

/// The other end: `store(tile, first_token, sum)` as Finisher::item() calls it.
template <int kRowTiles, int kSplit, typename Store>
__device__ __forceinline__ void finish_coded(Finisher& finisher, int token_rows, Store&& store) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    finisher.template item<kSplit>(token_rows, [&](int tile, int token, const float4& sum) {
      store(tile * kRowTiles + m, token, sum);
    });
  }
}

}  // namespace switchyard::streaming
