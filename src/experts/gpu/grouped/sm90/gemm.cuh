#pragma once

// Grouped GEMM on Hopper: out[row] = epilogue(W[e] a[row]) for the rows of every expert e.
//
// Bound by the tensor cores where experts have 128 rows or more. Persistent clusters of two CTAs
// take units from the device-side schedule. In a CTA one warpgroup loads (warp 0: schedule and TMA
// of the weights, and of contiguous rows; warp 1: proxy fence; warps 2 and 3: gathered rows by
// 16-byte cp.async) and two multiply: *cooperative*, 64 rows each of one 128 x 256 tile (of a tall
// one all of up to 192 rows by 64 rows of weights each), or *ping-pong*, a 128 x 192 tile each in
// turn, so that one's epilogue hides behind the other's products. Sums run over ascending k in
// steps of 16, whatever the tile.

#include "core/gpu/register_pool.hpp"
#include "core/gpu/swizzle.hpp"
#include "core/gpu/wgmma.cuh"
#include "experts/gpu/grouped/sm90/ring.cuh"
#include "experts/gpu/grouped/sm90/staging.cuh"
#include "experts/gpu/stage_cursor.cuh"

namespace switchyard {

/// Static shape of one kernel.
template <typename T_, Epilogue kEpilogue_, bool kGather_, bool kPingPong_>
struct Sm90Shape {
  using T = T_;
  static constexpr Epilogue kEpilogue = kEpilogue_;
  static constexpr bool kGated = is_gated(kEpilogue);
  static constexpr bool kKeeps = keeps_preactivation(kEpilogue);
  static constexpr bool kGather = kGather_;
  static constexpr bool kPingPong = kPingPong_;

  // Tall blocks of rows too. (In the second product they cost 10 us a launch and gained less.)
  static constexpr bool kTalls = kGated && !kPingPong;

  static constexpr int kTileN = kPingPong ? 192 : 256;  // rows of weights a tile
  static constexpr int kTileK = 64;                     // 128 bytes: one swizzled row
  static constexpr int kOutColumns = kGated ? kTileN / 2 : kTileN;
  static constexpr int kBoxColumns = kOutColumns % 64 == 0 ? 64 : 32;  // of a TMA store
  static constexpr int kRowsBytes = kTileRows * kTileK * 2;
  static constexpr int kWeightsBytes = kTileN * kTileK * 2;
  static constexpr int kStageBytes = kRowsBytes + kWeightsBytes;
  static constexpr int kStages = 4;
  // A tall tile: 192 rows, and half as many weights.
  static constexpr int kTallWeightsAt = kTallRows * kTileK * 2;
  static constexpr int kTallWeightsBytes = kWeightsBytes / 2;
  static constexpr int kLoadedRows = kTalls ? kTallRows : kTileRows;  // at most

  using Out = typename StagingOf<kEpilogue, kBoxColumns>::Type;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kMessagesAt = kStagingAt + 2 * Out::kBytes;
  static constexpr int kFullAt = kMessagesAt + kRingSlots * 16;
  static constexpr int kEmptyAt = kFullAt + kStages * 8;
  static constexpr int kGatheredAt = kEmptyAt + kStages * 8;
  static constexpr int kRingAt = kGatheredAt + kStages * 8;
  static constexpr int kTurnAt = kRingAt + kRingSlots * 8;
  static constexpr int kSharedBytes = kTurnAt + 2 * 8;

  static constexpr int kThreads = 384;
  static constexpr int kGatherThreads = 64;
  static constexpr int kLoadRegisters = 56;
  static constexpr int kMultiplyRegisters = 224;
  // Arrivals of one phase.
  static constexpr int kFullArrivals = kGather ? 2 : 1;
  static constexpr int kEmptyArrivals = 2 * (kPingPong ? 4 : 8);  // warps of both CTAs

  static_assert(kSharedBytes <= 232448, "more shared memory than a CTA can have");
  static_assert(!kTalls || (kTallWeightsAt + kTallWeightsBytes <= kStageBytes &&
                            TallTile<T>::kBytes <= Out::kBytes &&
                            TallTile<T>::kBoxes == kOutColumns / kBoxColumns));
  static_assert(kStageBytes % 1024 == 0 && kWeightsBytes / 2 % 1024 == 0,
                "the swizzle repeats every 1024 bytes");
  static_assert((kLoadRegisters + 2 * kMultiplyRegisters) * 128 <= launch_registers(kThreads));
};

struct Sm90Params {
  ScheduleParams schedule;
  EpilogueParams epilogue;
  const void* x;                  // gather: [N, depth]
  const std::int32_t* row_token;  // gather: [S], or null
  std::int32_t depth;             // length of the sums
  std::int32_t weight_rows;       // of one expert: columns of out, twice that when gated
  void* preactivation;            // [S, weight_rows], of the epilogues that keep it
};

/// What every role knows.
template <typename Shape>
struct Sm90Context {
  const Sm90Params& params;
  const CUtensorMap* out;
  const CUtensorMap* tall_weights;
  std::uint32_t shared;
  std::uint32_t cta;
  UnitRing ring;
  int num_steps;  // of kTileK along the sums

  using Cursor = StageCursor<Shape::kStages>;
  __device__ std::uint32_t rows_at(const Cursor& c) const {
    return shared + c.stage * Shape::kStageBytes;
  }
  __device__ std::uint32_t weights_at(const Cursor& c) const {
    return rows_at(c) + Shape::kRowsBytes;
  }
  __device__ std::uint32_t full(const Cursor& c) const {
    return shared + Shape::kFullAt + c.stage * 8;
  }
  __device__ std::uint32_t empty(const Cursor& c) const {
    return shared + Shape::kEmptyAt + c.stage * 8;
  }
  __device__ std::uint32_t gathered(const Cursor& c) const {
    return shared + Shape::kGatheredAt + c.stage * 8;
  }
};

/// The kernel before writes the rows of a second product.
__device__ __forceinline__ void wait_for_rows() {
  ptx::wait_for_previous_kernel();
  ptx::fence_proxy_async_global();
}

/// One thread: the weights of a tile, and its rows where they are contiguous.
template <typename Shape>
__device__ __forceinline__ void load_tile(const Sm90Context<Shape>& context, const Work& work,
                                          const CUtensorMap* weights, const CUtensorMap* rows,
                                          StageCursor<Shape::kStages>& cursor, bool is_first) {
  const CtaTile& tile = work.tile;
  const std::int32_t columns = context.params.epilogue.columns;
  const int first =
      work.expert * context.params.weight_rows + tile.column_tile * Shape::kOutColumns;
  const int second = first + (Shape::kGated ? columns : Shape::kTileN / 2);
  constexpr std::uint32_t kHalfWeights = Shape::kWeightsBytes / 2;
  constexpr std::uint32_t kHalfRowsBytes = Shape::kRowsBytes / 2;
  std::uint32_t bytes = Shape::kWeightsBytes;
  if (!Shape::kGather) {
    bytes += tile.rows > kHalfRows ? Shape::kRowsBytes : tile.rows > 0 ? kHalfRowsBytes : 0;
  }
  const auto load_weights = [&](const StageCursor<Shape::kStages>& to_stage, int k) {
    const std::uint32_t full = context.full(to_stage);
    const std::uint32_t to = context.weights_at(to_stage);
    ptx::mbarrier_wait(context.empty(to_stage), to_stage.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, bytes);
    if (tile.share_weights) {
      ptx::tma_load_2d_multicast(to + context.cta * kHalfWeights, weights, k,
                                 context.cta == 0 ? first : second, full, 3);
    } else {
      ptx::tma_load_2d(to, weights, k, first, full);
      ptx::tma_load_2d(to + kHalfWeights, weights, k, second, full);
    }
  };
  const auto load_rows = [&](const StageCursor<Shape::kStages>& to_stage, int k) {
    if constexpr (!Shape::kGather) {
      const std::uint32_t full = context.full(to_stage);
      const std::uint32_t to = context.rows_at(to_stage);
      if (tile.rows > 0) ptx::tma_load_2d(to, rows, k, tile.row, full);
      if (tile.rows > kHalfRows) {
        ptx::tma_load_2d(to + kHalfRowsBytes, rows, k, tile.row + kHalfRows, full);
      }
    }
  };
  int step = 0;
  if (!Shape::kGather && is_first) {
    // The weights need not wait for the kernel that writes the rows.
    StageCursor<Shape::kStages> begin = cursor;
    const int ahead = min(Shape::kStages, context.num_steps);
    for (; step < ahead; ++step, cursor.advance()) load_weights(cursor, step * Shape::kTileK);
    wait_for_rows();
    for (int s = 0; s < ahead; ++s, begin.advance()) load_rows(begin, s * Shape::kTileK);
  }
  for (; step < context.num_steps; ++step, cursor.advance()) {
    load_weights(cursor, step * Shape::kTileK);
    load_rows(cursor, step * Shape::kTileK);
  }
}

/// One thread: the weights of half a column tile, for a tall block of gathered rows.
template <typename Shape>
__device__ __forceinline__ void load_tall(const Sm90Context<Shape>& context, const Work& work,
                                          StageCursor<Shape::kStages>& cursor) {
  static_assert(Shape::kGather && Shape::kGated);
  const std::int32_t column = work.tile.column_tile * Shape::kOutColumns +
                              static_cast<std::int32_t>(context.cta) * Shape::kOutColumns / 2;
  const std::int32_t first = (work.expert * context.params.weight_rows + column) / 8;
  for (int step = 0; step < context.num_steps; ++step, cursor.advance()) {
    ptx::mbarrier_wait(context.empty(cursor), cursor.phase ^ 1);
    const std::uint32_t full = context.full(cursor);
    ptx::mbarrier_arrive_expect(full, Shape::kTallWeightsBytes);
    ptx::tma_load_4d(context.rows_at(cursor) + Shape::kTallWeightsAt, context.tall_weights,
                     step * Shape::kTileK, 0, 0, first, full);
  }
}

/// Warp 0: hands out units (in the cluster's first CTA) and loads what TMA can load.
template <typename Shape>
__device__ __forceinline__ void run_loader(const Sm90Context<Shape>& context,
                                           const CUtensorMap* weights, const CUtensorMap* rows) {
  const bool leads = context.cta == 0;
  UnitWalk<1, StackCut<Shape::kTalls>> walk(context.params.schedule,
                                            static_cast<std::int32_t>(blockIdx.x / 2),
                                            static_cast<std::int32_t>(gridDim.x / 2));
  if (leads) context.ring.send(0, walk.next());
  StageCursor<Shape::kStages> cursor;
  for (std::uint32_t index = 0;; ++index) {
    const Work work = context.ring.receive(index);
    if (work.expert < 0) break;
    if (leads) context.ring.send(index + 1, walk.next());
    if (threadIdx.x == 0) {
      context.ring.rearm(index);
      bool tall = false;
      if constexpr (Shape::kTalls) {
        tall = work.tile.tall;
        if (tall) load_tall(context, work, cursor);
      }
      if (!tall) load_tile(context, work, weights, rows, cursor, index == 0);
    }
    __syncwarp();
  }
  // Also where there was nothing to do: this kernel must not be over before its predecessor.
  if (!Shape::kGather) ptx::wait_for_previous_kernel();
}

/// Warps 2 and 3: rows of x by index. Eight threads bring one row's 128 bytes, swizzled as TMA
/// would; rows past the last repeat it and are never stored; columns past the end are zeros.
template <typename Shape>
__device__ __forceinline__ void run_gather(const Sm90Context<Shape>& context) {
  constexpr int kPasses = Shape::kLoadedRows / 8;
  const int thread = static_cast<int>(threadIdx.x) - 64;
  const int chunk = thread % 8;
  const int first_row = thread / 8;
  const std::uint32_t to_offset = swizzled_place_of_eight(first_row, chunk);
  const std::int32_t depth_chunks = context.params.depth / 8;
  const int4* x = static_cast<const int4*>(context.params.x) + chunk;
  StageCursor<Shape::kStages> cursor;
  for (std::uint32_t index = 0;; ++index) {
    const Work work = context.ring.receive(index);
    if (work.expert < 0) return;
    const std::int32_t rows = work.tile.rows;
    std::uint32_t from[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::int32_t row = work.tile.row + max(min(first_row + 8 * pass, rows - 1), 0);
      const std::int32_t token = context.params.row_token == nullptr || rows == 0
                                     ? row
                                     : __ldg(context.params.row_token + row);
      from[pass] = static_cast<std::uint32_t>(token) * static_cast<std::uint32_t>(depth_chunks);
    }
    for (int step = 0; step < context.num_steps; ++step, cursor.advance()) {
      ptx::mbarrier_wait(context.empty(cursor), cursor.phase ^ 1);
      const std::uint32_t to = context.rows_at(cursor) + to_offset;
      const std::uint32_t bytes = step * 8 + chunk < depth_chunks ? 16 : 0;
      const int4* step_x = bytes > 0 ? x + step * 8 : static_cast<const int4*>(context.params.x);
      if (rows > 0) {
#pragma unroll
        for (int pass = 0; pass < kHalfRows / 8; ++pass) {
          ptx::cp_async_16(to + pass * 1024, step_x + from[pass], bytes);
        }
      }
      if (rows > kHalfRows) {
#pragma unroll
        for (int pass = kHalfRows / 8; pass < kTileRows / 8; ++pass) {
          ptx::cp_async_16(to + pass * 1024, step_x + from[pass], bytes);
        }
      }
#pragma unroll
      for (int pass = kTileRows / 8; pass < kPasses; ++pass) {
        if (rows > pass * 8) ptx::cp_async_16(to + pass * 1024, step_x + from[pass], bytes);
      }
      ptx::cp_async_arrive(context.gathered(cursor));
    }
  }
}

/// Warp 1: cp.async writes through the generic proxy and wgmma reads through the async one. One
/// thread fences for all: cheaper than a fence in each multiplying thread, and the gathering
/// warps need not wait for their own copies.
template <typename Shape>
__device__ __forceinline__ void run_fence(const Sm90Context<Shape>& context) {
  if (threadIdx.x % 32 != 0) return;
  StageCursor<Shape::kStages> cursor;
  for (std::uint32_t index = 0;; ++index) {
    const Work work = context.ring.receive(index);
    if (work.expert < 0) return;
    for (int step = 0; step < context.num_steps; ++step, cursor.advance()) {
      ptx::mbarrier_wait(context.gathered(cursor), cursor.phase);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(context.full(cursor));
    }
  }
}

}  // namespace switchyard
