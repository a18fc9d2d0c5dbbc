#pragma once

// The choice of tile for a grouped GEMM: a pure function of the problem and the chip.

#include <cstdint>

namespace switchyard {

/// How the two multiplying warpgroups of a CTA share the work.
enum class TileShape : std::uint8_t {
  kAuto,         ///< As choose_tile says.
  kCooperative,  ///< One tile of 128 x 256, 64 rows each.
  kPingPong,     ///< Tiles of 128 x 192 in turn; the epilogue hides behind the other's products.
};

struct GroupedProblem {
  std::int64_t depth = 0;    ///< Length of the sums.
  std::int64_t columns = 0;  ///< Of the output, one per row of weights (2I when gated).
  bool gated = false;
};

/// Cycles of an SM for one tile.
[[nodiscard]] constexpr double tile_cycles(TileShape shape, const GroupedProblem& problem) {
  const double steps = static_cast<double>((problem.depth + 63) / 64);
  if (shape == TileShape::kPingPong) return steps * 768;
  return steps * 1024 + (problem.gated ? 2000 : 500);  // what the epilogue leaves uncovered
}

/// Tiles that one block of rows needs.
[[nodiscard]] constexpr std::int64_t column_tiles(TileShape shape, std::int64_t columns) {
  const std::int64_t width = shape == TileShape::kPingPong ? 192 : 256;
  return (columns + width - 1) / width;
}

[[nodiscard]] constexpr TileShape choose_tile(const GroupedProblem& problem) {
  const auto cost = [&](TileShape shape) {
    return tile_cycles(shape, problem) * static_cast<double>(column_tiles(shape, problem.columns));
  };
  return cost(TileShape::kPingPong) < cost(TileShape::kCooperative) ? TileShape::kPingPong
                                                                    : TileShape::kCooperative;
}

}  // namespace switchyard
