#pragma once

// The warps that fill the stages: one for the weights and one for rows in the order of codes, by
// tensor copies; or for rows as they lie two by cp.async, and one that makes what these have
// written visible to wgmma.

#include <cuda.h>

#include <cstdint>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/grouped/coded/shape.cuh"

namespace switchyard {

template <typename Shape>
struct CodedRing {
  using Cursor = StageCursor<Shape::kStages>;
  std::uint32_t base;

  __device__ __forceinline__ std::uint32_t weights_at(const Cursor& c) const {
    return base + c.stage * Shape::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t rows_at(const Cursor& c) const {
    return weights_at(c) + Shape::kRowsAt;
  }
  __device__ __forceinline__ std::uint32_t full(const Cursor& c) const {
    return base + Shape::kFullAt + 8 * c.stage;
  }
  __device__ __forceinline__ std::uint32_t empty(const Cursor& c) const {
    return base + Shape::kEmptyAt + 8 * c.stage;
  }
  __device__ __forceinline__ std::uint32_t gathered(const Cursor& c) const {
    return base + Shape::kGatheredAt + 8 * c.stage;
  }
  /// One thread, before all others.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(base + Shape::kFullAt + 8 * stage, 2);
      ptx::mbarrier_init(base + Shape::kEmptyAt + 8 * stage, Shape::kMultiplyWarps);
      ptx::mbarrier_init(base + Shape::kGatheredAt + 8 * stage, 32 * Shape::kGatherers);
    }
    ptx::fence_mbarrier_init();
  }
};

/// One thread. The box of a stage: groups of 8 rows behind each other, of the gate, then of up.
template <typename Shape>
__device__ __forceinline__ void load_weights(const CodedRing<Shape>& ring, const CodedWalk& walk,
                                             const CUtensorMap* map, int turns) {
  constexpr int kMatrices = Shape::kGated ? 2 : 1;
  constexpr int kGroups = Shape::kGroups / kMatrices;
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem& item) {
    for (int turn = 0; turn < turns; ++turn, cursor.advance()) {
      ptx::mbarrier_wait(ring.empty(cursor), cursor.phase ^ 1);
      ptx::mbarrier_arrive_expect(ring.full(cursor), Shape::kWeightsBytes);
      ptx::tma_load_3d(ring.weights_at(cursor), map, turn * (Shape::kGroupBytes / 8),
                       item.tile * kGroups, kMatrices * item.expert, ring.full(cursor));
    }
  });
}

/// The tokens of an item's rows: a lane has those of rows `lane`, 32 + `lane` and so on.
template <int kRows>
struct CodedTokens {
  int token[(kRows + 31) / 32];

  __device__ __forceinline__ void look_up(const CodedItem& item, const CodedParams& params,
                                          int lane) {
#pragma unroll
    for (int i = 0; i < (kRows + 31) / 32; ++i) {
      const int row = item.row + min(lane + 32 * i, item.rows - 1);
      token[i] = params.row_token == nullptr ? row : __ldg(params.row_token + row);
    }
  }
  /// All lanes ask, with rows of the same 32.
  [[nodiscard]] __device__ __forceinline__ int of(int row) const {
    int mine = token[0];
#pragma unroll
    for (int i = 1; i < (kRows + 31) / 32; ++i) mine = row < 32 * i ? mine : token[i];
    return __shfl_sync(~0U, mine, row % 32);
  }
};

/// A warp takes every other row. A lane of a row's 64 values brings two of them to where wgmma
/// looks for them: the numbers of a lane of a step (coded/layout.hpp) are its operands 2t, 2t + 1,
/// 2t + 8 and 2t + 9 of two products (coded::ordered_run). Zeros past the end of a row.
template <typename Shape>
__device__ __forceinline__ void gather_rows(const CodedRing<Shape>& ring, const CodedWalk& walk,
                                            const CodedParams& params, int turns, int gatherer) {
  constexpr int kAtOnce = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row_bytes = 2 * params.depth;
  const int t = lane % 16 / 4;
  const int chunk = lane / 16 * 4 + coded::ordered_run(t, lane % 4);
  const std::uint32_t word = 4 * t;
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem& item) {
    CodedTokens<Shape::kRows> tokens;
    tokens.look_up(item, params, lane);
    for (int turn = 0; turn < turns; ++turn, cursor.advance()) {
      ptx::mbarrier_wait(ring.empty(cursor), cursor.phase ^ 1);
      const std::uint32_t to = ring.rows_at(cursor) + word;
      const int at = turn * 2 * kCodedTurn + 4 * lane;
      for (int r = gatherer; r < item.rows; r += Shape::kGatherers * kAtOnce) {
        const std::byte* from[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int row = r + Shape::kGatherers * i;
          from[i] = params.x + static_cast<std::int64_t>(tokens.of(row)) * row_bytes;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int row = r + Shape::kGatherers * i;
          if (row >= item.rows) break;
          const std::uint32_t place =
              to + static_cast<std::uint32_t>(row * 128 + ((chunk ^ (row % 8)) << 4));
#pragma unroll
          for (int box = 0; box < 2; ++box) {
            const bool exists = at + 128 * box < row_bytes;
            ptx::cp_async_4(place + box * Shape::kBoxBytes,
                            exists ? from[i] + at + 128 * box : params.x, exists ? 4 : 0);
          }
        }
      }
      ptx::cp_async_arrive(ring.gathered(cursor));
    }
  });
}

/// One thread. Rows in the order of codes, those of an item one behind the other; what a copy
/// brings beyond them is another expert's, or zeros, and is multiplied for nobody.
template <typename Shape>
__device__ __forceinline__ void load_rows(const CodedRing<Shape>& ring, const CodedWalk& walk,
                                          const CodedParams& params, const CUtensorMap* map,
                                          int turns) {
  constexpr int kBoxes = 2;  // of 128 bytes: 64 values, or one number of 128
  constexpr int kCopyBytes = 128 * Shape::kRowsOfCopy;
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem& item) {
    const int copies = (item.rows + Shape::kRowsOfCopy - 1) / Shape::kRowsOfCopy;
    const bool beside = Shape::kBeside && params.beside && item.rows <= kRowsBeside;
    const std::uint32_t to_next = beside ? 128 * kRowsBeside : Shape::kBoxBytes;
    for (int turn = 0; turn < turns; ++turn, cursor.advance()) {
      ptx::mbarrier_wait(ring.empty(cursor), cursor.phase ^ 1);
      ptx::mbarrier_arrive_expect(ring.full(cursor), kBoxes * copies * kCopyBytes);
      const std::uint32_t to = ring.rows_at(cursor);
      const int first = kCodedTurn * turn;
      // Of split rows the second numbers follow the first ones of up to 128 values.
      const int second = Shape::kSplit ? min(64, (params.depth - first) / 2) : 64;
      for (int copy = 0; copy < copies; ++copy) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          ptx::tma_load_2d(to + box * to_next + copy * kCopyBytes, map, first + box * second,
                           item.row + copy * Shape::kRowsOfCopy, ring.full(cursor));
        }
      }
    }
  });
}

/// One thread fences for all: cp.async writes through the generic proxy, wgmma reads through the
/// async one.
template <typename Shape>
__device__ __forceinline__ void pass_rows_on(const CodedRing<Shape>& ring, const CodedWalk& walk,
                                             int turns) {
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem&) {
    for (int turn = 0; turn < turns; ++turn, cursor.advance()) {
      ptx::mbarrier_wait(ring.gathered(cursor), cursor.phase);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(ring.full(cursor));
    }
  });
}

}  // namespace switchyard
