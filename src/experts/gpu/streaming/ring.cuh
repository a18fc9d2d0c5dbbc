#pragma once

// The stream that both streaming kernels are made of: a ring of stages in shared memory, filled by
// two producer warps (weights, token rows), multiplied by eight consumer warps (or sixteen), and
// emptied of sums by a last one. Bound by the memory the weights come from; the roles keep it busy
// across experts:
//
//   weight warp ──► full[stage] ──► consumer warps   ──► part_full ──► finish warp
//   token warp  ──►     ▲                │ empty[stage]
//
// A work item is (a tile of weight rows) x (the token rows of one hit), summed over the whole of K.
// The warps of a tile share K: step s of 64 bytes belongs to warp s % split, whatever the stage it
// lies in, so a row's bits depend on neither the other rows nor the size of a stage. Of weights
// that are codes they do depend on how many rows the expert has (kChains in coded.cuh).

#include <cstdint>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/streaming/args.hpp"

namespace switchyard::streaming {

/// The warps of a block by what they do: consumers first.
template <int kConsumers_>
struct Crew {
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kWeightWarp = kConsumers;
  static constexpr int kTokenWarp = kConsumers + 1;
  static constexpr int kFinishWarp = kConsumers + 2;
  static constexpr int kWarps = kConsumers + 3;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kThreads == threads_of_block(kConsumers));
};
using UsualCrew = Crew<kFewConsumers>;
inline constexpr int kStepBytes = 64;
inline constexpr int kMaxPassRows = 64;  // rows of one expert that are multiplied at a time
inline constexpr int kMaxStages = kMaxRingStages;
inline constexpr int kPartBuffers = 2;
static_assert(kPartBuffers * 32 * 16 == kRingPartBytes);
// Full and empty of each stage, then of each buffer of partial sums; the scan's totals.
inline constexpr int kTotalsAt = (2 * kMaxStages + 2 * kPartBuffers) * 8;
inline constexpr int kBarrierBytes = kRingBarrierBytes;
static_assert(kTotalsAt + Crew<kManyConsumers>::kWarps * 4 <= kBarrierBytes);

/// Up to kMaxPassRows rows of one expert.
struct Hit {
  std::int32_t row;     // first of them in the plan
  std::int32_t packed;  // expert << 10 | level of Pieces << 8 | rows
  __device__ __forceinline__ int expert() const { return packed >> 10; }
  __device__ __forceinline__ int level() const { return packed >> 8 & 3; }
  __device__ __forceinline__ int rows() const { return packed & 255; }
};

/// One item of work.
struct Item {
  Hit hit;
  int index;  // of the hit
  int first;  // weight row (down), or column of the intermediate (up)
};

/// How an item is cut along the sum.
struct Chunks {
  int piece;         // bytes of a weight row in one stage, and from row to row there
  int token_stride;  // from token row to token row
  int tokens_at;     // where these begin in a stage
  int count;
};

// An odd number of steps from row to row: 8 lanes then read two rows without a bank conflict.
__device__ __forceinline__ int token_stride(int piece) { return piece | kStepBytes; }

__device__ __forceinline__ Chunks chunks_of(const Pieces& pieces, const Hit& hit) {
  const int level = hit.level();
  const int piece = pieces.bytes[level];
  return {piece, token_stride(piece), pieces.tokens_at[level], pieces.count[level]};
}

/// The largest pieces with which so many token rows fit a stage.
__device__ __forceinline__ int level_for(const Pieces& pieces, int token_rows) {
  int level = 0;
  while (level < kPieceLevels - 1 &&
         pieces.tokens_at[level] + token_rows * token_stride(pieces.bytes[level]) >
             pieces.stage_bytes) {
    ++level;
  }
  return level;
}

/// Where one role stands in the ring.
struct Cursor {
  int slot = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance(int num_slots) {
    if (++slot == num_slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

struct Ring {
  const unsigned char* memory;  // the same as `stages`
  std::uint32_t barriers;
  std::uint32_t stages;
  int num_stages;
  int stage_bytes;
  __device__ __forceinline__ std::uint32_t full(int slot) const { return barriers + 16 * slot; }
  __device__ __forceinline__ std::uint32_t empty(int slot) const { return full(slot) + 8; }
  __device__ __forceinline__ std::uint32_t stage(int slot) const {
    return stages + slot * stage_bytes;
  }
  __device__ __forceinline__ std::uint32_t part_full(int buffer) const {
    return barriers + 16 * (kMaxStages + buffer);
  }
  __device__ __forceinline__ std::uint32_t part_empty(int buffer) const {
    return part_full(buffer) + 8;
  }
};

template <bool kHopper, typename Crew = UsualCrew>
__device__ __forceinline__ void init_ring(const Ring& ring) {
  for (int slot = 0; slot < ring.num_stages; ++slot) {
    // The announcement of a tensor copy, or an arrival of each lane; and each token lane.
    ptx::mbarrier_init(ring.full(slot), (kHopper ? 1 : 32) + 32);
    ptx::mbarrier_init(ring.empty(slot), Crew::kConsumers);
  }
  for (int buffer = 0; buffer < kPartBuffers; ++buffer) {
    ptx::mbarrier_init(ring.part_full(buffer), Crew::kConsumers);
    ptx::mbarrier_init(ring.part_empty(buffer), 1);
  }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  ptx::fence_mbarrier_init();
#endif
}

/// The rows of an expert in the plan.
struct ExpertRows {
  int begin;
  int count;
};

/// Calls `put(index, expert, rows)` for the hits, ascending, at most pass_rows rows each; all
/// threads of the block call it. Returns how many. `rows_of(expert)`: ExpertRows.
template <typename Crew = UsualCrew, typename RowsOf, typename Put>
__device__ __forceinline__ int for_each_hit(int num_experts, int pass_rows, int* warp_totals,
                                            RowsOf&& rows_of, Put&& put) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int total = 0;
  for (int base = 0; base < num_experts; base += Crew::kThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    const ExpertRows of = expert < num_experts ? rows_of(expert) : ExpertRows{0, 0};
    const int rows = of.count;
    const int passes = (rows + pass_rows - 1) / pass_rows;
    int scan = passes;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(~0U, scan, offset);
      if (lane >= offset) scan += below;
    }
    if (lane == 31) warp_totals[warp] = scan;
    __syncthreads();
    int at = total + scan - passes;
#pragma unroll
    for (int w = 0; w < Crew::kWarps; ++w) {
      const int of_warp = warp_totals[w];
      if (w < warp) at += of_warp;
      total += of_warp;
    }
    for (int pass = 0; pass < passes; ++pass) {
      const int done = pass * pass_rows;
      put(at + pass, expert, ExpertRows{of.begin + done, min(pass_rows, rows - done)});
    }
    __syncthreads();
  }
  return total;
}

__device__ __forceinline__ Hit make_hit(const Pieces& pieces, int expert, const ExpertRows& rows) {
  return {rows.begin, expert << 10 | level_for(pieces, rows.count) << 8 | rows.count};
}

/// Lists the hits in ascending expert; all threads of the block call it. Returns how many.
template <typename Crew = UsualCrew>
__device__ __forceinline__ int list_hits(const std::int32_t* expert_begin,
                                         const std::int32_t* expert_rows, int num_experts,
                                         int pass_rows, const Pieces& pieces, Hit* hits,
                                         int* warp_totals) {
  return for_each_hit<Crew>(
      num_experts, pass_rows, warp_totals,
      [&](int expert) {
        return ExpertRows{expert_begin[expert], expert_rows[expert]};
      },
      [&](int at, int expert, const ExpertRows& rows) {
        hits[at] = make_hit(pieces, expert, rows);
      });
}

}  // namespace switchyard::streaming
