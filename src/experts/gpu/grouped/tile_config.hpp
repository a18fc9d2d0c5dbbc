#pragma once

// The choice of tile for a grouped GEMM: a pure function of the problem and the chip.

#include <cstdint>

namespace switchyard {

/// How the two multiplying warpgroups of a CTA share the work of a gated product. Plain products
/// are always cooperative: their short epilogue hides behind the next tile's first products.
enum class TileShape : std::uint8_t {
  kAuto,         ///< As choose_tile says.
  kCooperative,  ///< One tile of 128 x 256 (128 gate and 128 up columns), 64 rows each.
  kPingPong,     ///< Tiles of 128 x 192 in turn; the epilogue hides behind the other's products.
};

/// A gated first product: columns come in pairs, gate and up.
struct GatedProblem {
  std::int64_t hidden = 0;  ///< Length of the sums.
  std::int64_t inner = 0;   ///< Columns of the output.
  std::int64_t rows = 0;    ///< Of an expert, about; 0: many.
};

/// Columns of the output in one tile.
[[nodiscard]] constexpr std::int64_t tile_columns(TileShape shape) {
  return shape == TileShape::kPingPong ? 96 : 128;
}

/// Tiles that one block of rows needs.
[[nodiscard]] constexpr std::int64_t column_tiles(TileShape shape, std::int64_t inner) {
  return (inner + tile_columns(shape) - 1) / tile_columns(shape);
}

/// Cycles of an SM for one tile, by the tensor cores' rate and two constants measured on an H200:
/// what a cooperative tile's activation leaves uncovered, and what the narrow tile's larger share
/// of loads costs.
[[nodiscard]] constexpr double tile_cycles(TileShape shape, std::int64_t hidden) {
  const double steps = static_cast<double>((hidden + 63) / 64);
  return shape == TileShape::kPingPong ? steps * 768 * 1.03 : steps * 1024 + 1300;
}

/// Narrow tiles know no tall blocks: with fewer rows an expert than this the wide ones are faster
/// everywhere (Qwen3-30B: by 1 to 6% from 8 to 512 rows; at 2048 slower by 0.3%).
constexpr std::int64_t kManyRows = 1024;

[[nodiscard]] constexpr TileShape choose_tile(const GatedProblem& problem) {
  if (problem.rows > 0 && problem.rows < kManyRows) return TileShape::kCooperative;
  const auto cost = [&](TileShape shape) {
    return tile_cycles(shape, problem.hidden) *
           static_cast<double>(column_tiles(shape, problem.inner));
  };
  return cost(TileShape::kPingPong) < cost(TileShape::kCooperative) ? TileShape::kPingPong
                                                                    : TileShape::kCooperative;
}

}  // namespace switchyard
