#pragma once

// Which tile and how many splits the Hopper router GEMM takes: a pure function of the problem and
// the number of multiprocessors, so that it is tested without a GPU.

#include <algorithm>
#include <cstdint>

namespace switchyard {

constexpr std::int64_t kRouterTileRows = 128;  // tokens
constexpr std::int64_t kRouterTileDepth = 64;  // columns of H a step
constexpr std::int64_t kRouterStack = 2;       // tiles of tokens that share the gate's loads
constexpr int kRouterMostSplits = 4;           // a cluster has at most 8 blocks

struct RouterTile {
  int columns = 0;  ///< Experts of a tile: 64, 128, 192 or 256.
  int splits = 0;   ///< Blocks that share the sums of a tile: 1, 2 or 4.
};

/// Blocks that a launch has.
[[nodiscard]] constexpr std::int64_t router_blocks(std::int64_t num_tokens,
                                                   std::int64_t num_experts, RouterTile tile) {
  const std::int64_t stacks =
      (num_tokens + kRouterStack * kRouterTileRows - 1) / (kRouterStack * kRouterTileRows);
  return kRouterStack * stacks * ((num_experts + tile.columns - 1) / tile.columns) * tile.splits;
}

/// Clocks that a launch takes about, the tokens' way from memory left out: it is the same for all.
/// A step brings 128 rows of tokens and half a tile of the gate at 32 bytes a clock and multiplies
/// at 2048 products a clock; then sums go through shared memory once, and between blocks if split.
[[nodiscard]] constexpr std::int64_t router_clocks(std::int64_t num_tokens,
                                                   std::int64_t num_experts, std::int64_t hidden,
                                                   std::int64_t multiprocessors, RouterTile tile) {
  const std::int64_t steps = (hidden + kRouterTileDepth - 1) / kRouterTileDepth;
  const std::int64_t steps_of_block = (steps + tile.splits - 1) / tile.splits;
  const std::int64_t step = std::max(4 * tile.columns, 512 + 2 * tile.columns);
  const std::int64_t turns =
      (router_blocks(num_tokens, num_experts, tile) + multiprocessors - 1) / multiprocessors;
  return turns * (steps_of_block * step + 8 * tile.columns + (tile.splits > 1 ? 2000 : 1000));
}

/// The quickest by that count.
[[nodiscard]] constexpr RouterTile choose_router_tile(std::int64_t num_tokens,
                                                      std::int64_t num_experts, std::int64_t hidden,
                                                      std::int64_t multiprocessors) {
  const auto clocks = [&](RouterTile tile) {
    return router_clocks(num_tokens, num_experts, hidden, multiprocessors, tile);
  };
  RouterTile best{.columns = 256, .splits = 1};
  for (const int columns : {256, 192, 128, 64}) {
    for (int splits = 1; splits <= kRouterMostSplits; splits *= 2) {
      if (splits > 1 && splits * kRouterTileDepth > hidden) break;  // a split has whole steps
      const RouterTile tile{.columns = columns, .splits = splits};
      if (clocks(tile) < clocks(best)) best = tile;
    }
  }
  return best;
}

}  // namespace switchyard
