#pragma once

// The four warps that fill the stages: one for the weights by tensor copies, two for the rows by
// cp.async, and one that makes what these have written visible to wgmma.

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
    return weights_at(c) + Shape::kWeightsBytes;
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
                                             const CUtensorMap* map, int stages) {
  constexpr int kMatrices = Shape::kGated ? 2 : 1;
  constexpr int kGroups = Shape::kGroups / kMatrices;
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem& item) {
    for (int stage = 0; stage < stages; ++stage, cursor.advance()) {
      ptx::mbarrier_wait(ring.empty(cursor), cursor.phase ^ 1);
      ptx::mbarrier_arrive_expect(ring.full(cursor), Shape::kWeightsBytes);
      ptx::tma_load_3d(ring.weights_at(cursor), map, stage * (Shape::kGroupBytes / 8),
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
/// 2t + 8 and 2t + 9 of two products. Zeros past the end of a row.
template <typename Shape>
__device__ __forceinline__ void gather_rows(const CodedRing<Shape>& ring, const CodedWalk& walk,
                                            const CodedParams& params, int stages, int gatherer) {
  constexpr int kAtOnce = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row_bytes = 2 * params.depth;
  const int chunk = lane / 16 * 4 + lane % 4;
  const std::uint32_t word = lane % 16 / 4 * 4;
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem& item) {
    CodedTokens<Shape::kRows> tokens;
    tokens.look_up(item, params, lane);
    for (int stage = 0; stage < stages; ++stage, cursor.advance()) {
      ptx::mbarrier_wait(ring.empty(cursor), cursor.phase ^ 1);
      const std::uint32_t to = ring.rows_at(cursor) + word;
      const int at = stage * Shape::kTurns * 2 * kCodedTurn + 4 * lane;
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
          for (int box = 0; box < 2 * Shape::kTurns; ++box) {
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

/// The same of rows in the order of codes: a warp takes four rows at a time, eight lanes each,
/// which copy 16 bytes of each 64 values.
template <typename Shape>
__device__ __forceinline__ void gather_ordered_rows(const CodedRing<Shape>& ring,
                                                    const CodedWalk& walk,
                                                    const CodedParams& params, int stages,
                                                    int gatherer) {
  constexpr int kLanes = 8;             // of a row
  constexpr int kAtOnce = 32 / kLanes;  // rows of a warp
  constexpr int kStep = Shape::kGatherers * kAtOnce;
  constexpr int kBoxBytesOfRow = 128;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row_bytes = 2 * params.depth;
  const int first = gatherer * kAtOnce + lane / kLanes;
  // Rows of a lane are kStep = 8 apart, so the swizzle is the same for all.
  static_assert(kStep == 8);
  const auto place =
      static_cast<std::uint32_t>(first * kBoxBytesOfRow + (((lane % kLanes) ^ (first % 8)) << 4));
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem& item) {
    CodedTokens<Shape::kRows> tokens;
    tokens.look_up(item, params, lane);
    for (int stage = 0; stage < stages; ++stage, cursor.advance()) {
      ptx::mbarrier_wait(ring.empty(cursor), cursor.phase ^ 1);
      const std::uint32_t to = ring.rows_at(cursor) + place;
      const int begin = stage * Shape::kTurns * 2 * kCodedTurn + 16 * (lane % kLanes);
#pragma unroll 2
      for (int r = 0; r < item.rows; r += kStep) {
        const int of = tokens.of(r + first);
        if (r + first >= item.rows) continue;
        const std::byte* const from = params.x + static_cast<std::int64_t>(of) * row_bytes;
#pragma unroll
        for (int box = 0; box < 2 * Shape::kTurns; ++box) {
          const int at = begin + kBoxBytesOfRow * box;
          const bool exists = at < row_bytes;
          ptx::cp_async_16(to + kBoxBytesOfRow * r + box * Shape::kBoxBytes,
                           exists ? from + at : params.x, exists ? 16 : 0);
        }
      }
      ptx::cp_async_arrive(ring.gathered(cursor));
    }
  });
}

/// The same, each lane with the addresses of all its rows in registers: between the wait for a
/// stage and its copies nothing is looked up.
template <typename Shape>
__device__ __forceinline__ void gather_held_rows(const CodedRing<Shape>& ring,
                                                 const CodedWalk& walk, const CodedParams& params,
                                                 int stages, int gatherer) {
  constexpr int kLanes = 8;  // of a row
  constexpr int kStep = Shape::kGatherers * 32 / kLanes;
  constexpr int kMine = Shape::kRows / kStep;  // rows of a lane
  constexpr int kBoxBytesOfRow = 128;
  static_assert(kStep == 8 && Shape::kRows % kStep == 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row_bytes = 2 * params.depth;
  const int first = gatherer * 32 / kLanes + lane / kLanes;
  const auto place =
      static_cast<std::uint32_t>(first * kBoxBytesOfRow + (((lane % kLanes) ^ (first % 8)) << 4));
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem& item) {
    const std::byte* from[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int row = item.row + min(first + kStep * i, item.rows - 1);
      const int token = params.row_token == nullptr ? row : __ldg(params.row_token + row);
      from[i] = params.x + static_cast<std::int64_t>(token) * row_bytes;
    }
    int at = 16 * (lane % kLanes);
    for (int stage = 0; stage < stages; ++stage, cursor.advance()) {
      ptx::mbarrier_wait(ring.empty(cursor), cursor.phase ^ 1);
      const std::uint32_t to = ring.rows_at(cursor) + place;
#pragma unroll
      for (int box = 0; box < 2 * Shape::kTurns; ++box, at += kBoxBytesOfRow) {
        const int bytes = at < row_bytes ? 16 : 0;  // zeros past the end of a row
        const int offset = at < row_bytes ? at : 0;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
          if (first + kStep * i >= item.rows) break;
          ptx::cp_async_16(to + kStep * kBoxBytesOfRow * i + box * Shape::kBoxBytes,
                           from[i] + offset, bytes);
        }
      }
      ptx::cp_async_arrive(ring.gathered(cursor));
    }
  });
}

/// One thread fences for all: cp.async writes through the generic proxy, wgmma reads through the
/// async one.
template <typename Shape>
__device__ __forceinline__ void pass_rows_on(const CodedRing<Shape>& ring, const CodedWalk& walk,
                                             int stages) {
  typename CodedRing<Shape>::Cursor cursor;
  walk.for_each([&](const CodedItem&) {
    for (int stage = 0; stage < stages; ++stage, cursor.advance()) {
      ptx::mbarrier_wait(ring.gathered(cursor), cursor.phase);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(ring.full(cursor));
    }
  });
}

}  // namespace switchyard
