#pragma once

// What the warps of the grouped product with codes share: where things lie in shared memory, and
// the walk over the items.

#include <cuda.h>

#include <cstdint>

#include "core/gpu/ptx.cuh"
#include "core/gpu/register_pool.hpp"
#include "experts/gpu/activation_params.hpp"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/stage_cursor.cuh"
#include "switchyard/experts.hpp"

namespace switchyard {

enum class CodedEpilogue : std::uint8_t { kGated, kPlain, kLinear };

/// How token rows come: gathered by 4 bytes as they lie; or by tensor copies in the order of codes,
/// as they are or each value as two of e4m3 (split.hpp).
enum class CodedGather : std::uint8_t { kPlain, kOrdered, kSplit };

inline constexpr int kCodedTurn = 128;  // values along the sum, of a stage
inline constexpr int kCodedMostExperts = 1024;
/// Split rows of an item up to which the second numbers lie behind the first ones, so that both are
/// columns of the same products: with so few each product takes as long as one of twice as many.
inline constexpr int kRowsBeside = 16;

/// @tparam kGather_  In the order of codes a first product writes its rows as well, not split.
/// @tparam kRows_    Of an expert that are multiplied at a time, at most.
/// @tparam kMultipliers  Warpgroups that multiply, 64 weight rows each: 4, or 2 with twice the
///                       registers, for twice the rows.
template <WeightFormat kStored, CodedEpilogue kEpilogue_, CodedGather kGather_, int kRows_,
          int kMultipliers = 4>
struct CodedShape {
  static constexpr WeightFormat kFormat = kStored;
  static constexpr CodedEpilogue kEpilogue = kEpilogue_;
  static constexpr CodedGather kGather = kGather_;
  static constexpr bool kSplit = kGather == CodedGather::kSplit;
  static_assert(kSplit == (kFormat == WeightFormat::kMxfp4));
  static constexpr bool kOrdered = kGather != CodedGather::kPlain;
  static constexpr int kRows = kRows_;
  static constexpr int kLeastRows = kMultipliers == 2 ? 32 : 16;  // that products are made for
  static constexpr bool kGated = kEpilogue == CodedEpilogue::kGated;
  static constexpr int kWarps = 4 * kMultipliers + 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMultiplyWarps = 4 * kMultipliers;
  static constexpr int kWeightWarp = kMultiplyWarps;
  static constexpr int kRowsWarp = kMultiplyWarps + 1;  // or the one that fences for gathered rows
  static constexpr int kGatherWarp = kMultiplyWarps + 2;  // and the next
  static constexpr int kGatherers = 2;
  static constexpr int kMultiplyRegisters = kMultipliers == 2 ? 232 : kOrdered ? 112 : 104;
  static constexpr int kLoadRegisters = kMultipliers == 2 ? 40 : kOrdered ? 32 : 64;
  static_assert(32 * kMultiplyWarps * kMultiplyRegisters + 128 * kLoadRegisters <=
                launch_registers(kThreads));

  /// Groups of 8 weight rows of an item: gated, as many of the gate as of up.
  static constexpr int kGroups = 2 * kMultiplyWarps;
  static constexpr int kColumns = (kGated ? 4 : 8) * kGroups;  // of the output
  /// Of a group in a stage.
  static constexpr int kGroupBytes = kCodedTurn / coded::kUnitValues * coded::unit_bytes(kFormat);
  static constexpr int kWeightsBytes = kGroups * kGroupBytes;
  /// Of 64 values of each row, or (split) of one number of 128; swizzled.
  static constexpr int kBoxBytes = kRows * 128;
  static constexpr bool kBeside = kSplit && kLeastRows == kRowsBeside;
  /// That one tensor copy brings: of 8, their number costs more than what they bring too much.
  /// Where second numbers follow kRowsBeside first ones, no more than these.
  static constexpr int kRowsOfCopy = kMultipliers == 2 ? 32 : kBeside ? kRowsBeside : 24;
  static_assert(!kOrdered || kRows % kRowsOfCopy == 0);
  static constexpr int kRowsAt = (kWeightsBytes + 1023) / 1024 * 1024;
  static constexpr int kStageBytes = kRowsAt + 2 * kBoxBytes;
  static constexpr int kStages = 200 * 1024 / kStageBytes;

  static constexpr int kHitsAt = kStages * kStageBytes;
  static constexpr int kHitsBytes = 16 * (kCodedMostExperts + 1);
  static constexpr int kFullAt = kHitsAt + kHitsBytes;
  static constexpr int kEmptyAt = kFullAt + 8 * kStages;
  static constexpr int kGatheredAt = kEmptyAt + 8 * kStages;
  static constexpr int kTotalsAt = kGatheredAt + 8 * kStages;
  static constexpr int kSharedBytes = kTotalsAt + 8 * kWarps;
  static_assert(kHitsAt % 16 == 0 && kFullAt % 8 == 0 && kSharedBytes <= 227 * 1024);
};

struct CodedParams {
  const std::byte* x;             // [., depth], bf16
  const std::int32_t* row_token;  // or null
  const float* scales;
  const float* row_scales;  // of split rows
  const float* bias;        // or null
  void* out;                // [., columns], bf16
  const std::int32_t* expert_begin;
  const std::int32_t* expert_rows;
  std::int32_t num_experts;
  std::int32_t depth;
  std::int32_t columns;
  bool beside;  // split rows, as kRowsBeside says; else the number of rows decides nothing
  ActivationParams activation;
};

/// An expert with rows.
struct CodedHit {
  std::int32_t expert;
  std::int32_t begin;   // its first row
  std::int32_t rows;    // of it
  std::int32_t passes;  // of the experts before it
};

/// Rows of an expert that are multiplied with a tile of its weights.
struct CodedItem {
  std::int32_t expert;
  std::int32_t tile;
  std::int32_t row;
  std::int32_t rows;
};

/// Items of a block in turn, ascending. The passes over one tile of weights follow each other, so
/// that blocks side by side read it from memory once.
struct CodedWalk {
  const CodedHit* hits;
  int num_hits;
  int tiles;

  template <typename Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    int hit = 0;
    for (int i = static_cast<int>(blockIdx.x);; i += static_cast<int>(gridDim.x)) {
      while (hit < num_hits && i >= hits[hit + 1].passes * tiles) ++hit;
      if (hit == num_hits) return;
      const CodedHit of = hits[hit];
      const int passes = hits[hit + 1].passes - of.passes;
      const int here = i - of.passes * tiles;
      // Equal passes of whole tiles of 8 rows.
      const int each = ((of.rows + passes - 1) / passes + 7) / 8 * 8;
      const int first = here % passes * each;
      body(CodedItem{of.expert, here / passes, of.begin + first, min(each, of.rows - first)});
    }
  }
};

/// Lists the experts with rows; all threads of the block call it.
template <typename Shape>
__device__ __forceinline__ CodedWalk list_hits(const CodedParams& params, unsigned char* shared) {
  auto* const hits = reinterpret_cast<CodedHit*>(shared + Shape::kHitsAt);
  auto* const totals = reinterpret_cast<int2*>(shared + Shape::kTotalsAt);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int2 before{0, 0};  // hits, passes
  for (int base = 0; base < params.num_experts; base += Shape::kThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    const bool exists = expert < params.num_experts;
    const int rows = exists ? __ldg(params.expert_rows + expert) : 0;
    const int begin = exists ? __ldg(params.expert_begin + expert) : 0;
    const int2 mine{rows > 0 ? 1 : 0, (rows + Shape::kRows - 1) / Shape::kRows};
    int2 scan = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int hits_below = __shfl_up_sync(~0U, scan.x, offset);
      const int passes_below = __shfl_up_sync(~0U, scan.y, offset);
      if (lane >= offset) scan = {scan.x + hits_below, scan.y + passes_below};
    }
    if (lane == 31) totals[warp] = scan;
    __syncthreads();
    int2 at{before.x + scan.x - mine.x, before.y + scan.y - mine.y};
    const int warps = min(Shape::kWarps, (params.num_experts - base + 31) / 32);
    for (int w = 0; w < warps; ++w) {
      const int2 of_warp = totals[w];
      if (w < warp) at = {at.x + of_warp.x, at.y + of_warp.y};
      before = {before.x + of_warp.x, before.y + of_warp.y};
    }
    if (rows > 0) hits[at.x] = {expert, begin, rows, at.y};
    __syncthreads();
  }
  if (threadIdx.x == 0) hits[before.x] = {-1, 0, 0, before.y};
  __syncthreads();
  return {hits, before.x, (params.columns + Shape::kColumns - 1) / Shape::kColumns};
}

}  // namespace switchyard
