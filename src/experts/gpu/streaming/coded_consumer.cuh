#pragma once

// What the consumer warps and the finish warp do where weights are codes.

#include <type_traits>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/streaming/coded.cuh"
#include "experts/gpu/streaming/consumer.cuh"

namespace switchyard::streaming {

/// A warp's groups of 8 rows in a stage, upper and lower, and their scales; how many of them exist.
template <typename W>
struct CodedRows {
  int group[2];
  int count;
  ScalesOf<W> scales;
};

template <typename W, int kTokenTiles>
using SumsOf = typename TurnMath<W>::template Sums<kTokenTiles>;

/// Adds a warp's turns of one item: turn t belongs to the warp with t % kSplit == share.
template <typename W, int kGroups, int kTokenTiles, int kSplit, typename Crew>
__device__ __forceinline__ void multiply_coded(Consumer<Crew>& consumer,
                                               SumsOf<W, kTokenTiles>& sums, int share,
                                               CodedRows<W>& rows, int token_rows,
                                               const Chunks& chunks) {
  constexpr int kTurnBytes = kTurnUnits * Weights<W>::kUnitBytes;
  constexpr int kTurnSteps = 2 * kTurnUnits;
  const Ring& ring = consumer.ring;
  Cursor& cursor = consumer.cursor;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int steps = (consumer.row_bytes + kStepBytes - 1) / kStepBytes;
  const int total = (consumer.row_bytes + kTurnTokenBytes - 1) / kTurnTokenBytes;
  const int turns_of_piece = chunks.piece / kTurnTokenBytes;
  int offset[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    offset[i] = rows.group[i] * group_stride<W>(chunks.piece) + lane_place<Weights<W>::kFormat>();
  }
  rows.scales.fetch();
  int token_offset[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    token_offset[n] =
        chunks.tokens_at + min(8 * n + lane / 4, token_rows - 1) * chunks.token_stride;
  }
  for (int before = 0; before < total; before += turns_of_piece) {
    const int turns = min(turns_of_piece, total - before);
    ptx::mbarrier_wait(ring.full(cursor.slot), cursor.phase);
    const unsigned char* stage = ring.memory + cursor.slot * ring.stage_bytes;
    const auto turn = [&]<bool kWhole>(std::bool_constant<kWhole>, int t, int steps_left) {
      const unsigned char* codes[kGroups];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) codes[i] = stage + t * kTurnBytes + offset[i];
      const unsigned char* tokens = stage + t * kTurnTokenBytes;
      TurnMath<W>::template multiply<kWhole, kGroups, kTokenTiles>(
          sums, codes, steps_left, before + t, rows.scales, [&](int n, int step) {
            const int at = lane_tokens<Weights<W>::kFormat, kWhole>(step, steps_left);
            return load_16(tokens + at + token_offset[n]);
          });
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
  TurnMath<W>::template finish<kTokenTiles>(sums.chain[0], rows.scales);
}

/// One item, whose sums are handed to the finish warp. A warp has kLeastGroups to two
/// groups; with none it hands over zeros.
template <typename W, int kLeastGroups, int kSplit, typename Crew>
__device__ __forceinline__ void coded_item(Consumer<Crew>& consumer, int share, CodedRows<W>& rows,
                                           int token_rows, const Chunks& chunks) {
  with_token_tiles<4>(token_rows, [&]<int kTokenTiles>(std::integral_constant<int, kTokenTiles>) {
    SumsOf<W, kTokenTiles> sums;
    if (kLeastGroups == 2 || rows.count == 2) {
      multiply_coded<W, 2, kTokenTiles, kSplit>(consumer, sums, share, rows, token_rows, chunks);
    } else if (rows.count == 1) {
      multiply_coded<W, 1, kTokenTiles, kSplit>(consumer, sums, share, rows, token_rows, chunks);
    } else {
      consumer.skip(chunks.count);
    }
    consumer.hand_over(sums.chain[0], token_rows);
  });
}

}  // namespace switchyard::streaming
