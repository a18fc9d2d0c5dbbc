#pragma once

// Plan of a compact layout, a tile of whole tokens a block: when.

#include <bit>
#include <cstdint>

#include "core/gpu/stage_workspace.hpp"

namespace switchyard::planning {

inline constexpr int kTileSize = 512;         // assignments of a block, a thread each
inline constexpr int kMostTileExperts = 256;  // two a word of StageWorkspace::plan_counts

/// Tokens must not straddle warps, sums over all blocks must fit 16 bits, and all blocks must be
/// resident together.
[[nodiscard]] constexpr bool are_tiles(std::int64_t num_tokens, std::int64_t top_k,
                                       std::int32_t num_experts, int multiprocessors) {
  const std::int64_t size = num_tokens * top_k;
  const std::int64_t blocks = (size + kTileSize - 1) / kTileSize;
  return num_experts > 0 && num_experts <= kMostTileExperts && top_k <= 32 &&
         std::has_single_bit(static_cast<std::uint64_t>(top_k)) && blocks > 1 &&
         blocks <= multiprocessors &&
         blocks * (kMostTileExperts / 2) <= StageWorkspace::kMaxPlanCounts && size <= 0xffff;
}

}  // namespace switchyard::planning
