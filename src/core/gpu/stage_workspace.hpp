#pragma once

#include <cstdint>

namespace switchyard {

/// Which half of StageWorkspace::plan_counts is posted to, and what the call before left there.
struct alignas(8) PlanTurn {
  std::uint32_t calls;   ///< Even: the first half.
  std::uint32_t posted;  ///< Words of the other half that are not zero.
};

/// How Execution::workspace begins; what follows is scratch of whichever stage runs. Zero at first.
/// Between calls all of it is zero but the last two: each kernel leaves its counters as it found
/// them.
struct StageWorkspace {
  static constexpr int kMaxTiles = 1024;
  static constexpr int kMaxPlanCounts = 128 * 128;

  std::uint32_t blocks_arrived;  ///< Where all blocks of a grid meet (plan/counting.cuh).
  std::uint32_t blocks_left;
  std::uint32_t padding[60];
  std::uint32_t tile_parts[kMaxTiles];  ///< Parts of an output tile that are done (router GEMM).
  /// Where the blocks of a plan post their counts (plan/plan_tiles_cuda.cu), in halves that take
  /// turns: a call clears the other half for the next, as none of its blocks reads that.
  PlanTurn plan_turn;
  std::uint32_t plan_counts[2][kMaxPlanCounts];
};
static_assert(sizeof(StageWorkspace) % 256 == 0);

}  // namespace switchyard
