#pragma once

// Which tile comes when in the grouped GEMM: pure functions of the experts' row counts, shared by
// the kernels and by tests on the host.
//
// A *unit* is what a cluster of two CTAs does at a time. Where an expert has rows enough the two
// stand above each other and share one tile of weights (each loads half of it, multicast). What is
// left over, fewer rows than a stack is worth, is done side by side: both CTAs take the same rows
// and neighbouring column tiles. So no more than 63 rows of an expert are padding:
//
//      rows          columns ->  n0    n1    n2         stack: CTA 0 above CTA 1
//      0..255                   stack stack stack
//      256..383 or 319          [ side by side ] split   side by side: CTA 0 n0, CTA 1 n1
//                                                        split: 64 rows each, weights shared
//
// Where the kernel can also take the weights as the side of 64 and the rows as the other, a *tall*
// block of 129 to 192 rows takes the place of a block of 128 and a half-empty one of 64: each CTA
// multiplies all its rows by half of the column tile, and at most 15 of them are padding.

#include <cstdint>

#include "core/gpu/host_device.hpp"

namespace switchyard {

constexpr int kTileRows = 128;             ///< Rows of one CTA.
constexpr int kHalfRows = kTileRows / 2;   ///< Rows of one wgmma: a tail of so few is half a tile.
constexpr int kStackRows = 2 * kTileRows;  ///< Rows of a cluster of two CTAs above each other.
constexpr int kTallRows = 192;             ///< Most rows of a tall block.
constexpr int kStacksPerGroup = 8;         ///< Stacks that walk along the columns together: their
                                           ///< rows and the weights in use stay in the L2 cache.

/// How two CTAs share a unit.
enum class UnitKind : std::int32_t {
  kStack,       ///< CTA c: rows 128c.., same columns, weights shared.
  kSideBySide,  ///< CTA c: column tile + c, same rows, nothing shared.
  kSplit,       ///< CTA c: rows 64c.., same columns, weights shared: an odd last column tile.
  kTall,        ///< CTA c: all rows, half c of the column tile, nothing shared.
};

/// One unit; `rows` may be fewer than its kind has room for.
struct Unit {
  std::int32_t row = 0;  ///< First row, counted from the expert's.
  std::int32_t rows = 0;
  std::int32_t column_tile = 0;
  UnitKind kind = UnitKind::kStack;
};

/// How the rows of one expert are cut.
struct RowCut {
  std::int32_t stacks = 0;   ///< Units' worth of up to 256 rows, above each other.
  std::int32_t singles = 0;  ///< Blocks of up to 128 rows, side by side.
  std::int32_t talls = 0;    ///< 0 or 1: the last block, if it is a tall one.
};

/// Fewer than 193 left-over rows cost less side by side (no idle CTA) than as a half-empty stack.
template <bool kTalls = false>
SWITCHYARD_HOST_DEVICE constexpr RowCut cut_rows(std::int32_t rows) {
  const std::int32_t stacks = rows / kStackRows;
  const std::int32_t left = rows % kStackRows;
  if (left > kTallRows) return {stacks + 1, 0, 0};
  if (kTalls && left > kTileRows) return {stacks, 0, 1};
  if (kTalls && stacks > 0 && left > 0 && left <= kHalfRows) return {stacks - 1, 1, 1};
  return {stacks, (left + kTileRows - 1) / kTileRows, 0};
}

/// Units of one expert whose output has `column_tiles` tiles.
template <bool kTalls = false>
SWITCHYARD_HOST_DEVICE constexpr std::int32_t units_of(std::int32_t rows,
                                                       std::int32_t column_tiles) {
  const RowCut cut = cut_rows<kTalls>(rows);
  return (cut.stacks + cut.talls) * column_tiles + cut.singles * ((column_tiles + 1) / 2);
}

/// Unit `index` in [0, units_of(rows, column_tiles)). Inside a group of stacks the rows run first,
/// then the columns; other blocks follow their columns' stacks, while the weights are hot.
template <bool kTalls = false>
SWITCHYARD_HOST_DEVICE constexpr Unit unit_at(std::int32_t index, std::int32_t rows,
                                              std::int32_t column_tiles) {
  const RowCut cut = cut_rows<kTalls>(rows);
  const std::int32_t groups = (cut.stacks + kStacksPerGroup - 1) / kStacksPerGroup;
  const std::int32_t last_group = groups > 0 ? groups - 1 : 0;
  std::int32_t group = index / (kStacksPerGroup * column_tiles);
  if (group > last_group) group = last_group;
  index -= group * kStacksPerGroup * column_tiles;
  const bool last = group == last_group;
  const std::int32_t stacks = last ? cut.stacks - group * kStacksPerGroup : kStacksPerGroup;
  const std::int32_t singles = last ? cut.singles : 0;
  const std::int32_t talls = last ? cut.talls : 0;

  const std::int32_t per_two_columns = 2 * (stacks + talls) + singles;
  const std::int32_t column_tile = index / per_two_columns * 2;
  index %= per_two_columns;
  const bool two_columns = column_tile + 1 < column_tiles;
  const std::int32_t stacks_here = two_columns ? 2 * stacks : stacks;
  if (index < stacks_here) {
    const std::int32_t row = (group * kStacksPerGroup + index % stacks) * kStackRows;
    const std::int32_t rest = rows - row;
    return {row, rest < kStackRows ? rest : kStackRows, column_tile + index / stacks,
            UnitKind::kStack};
  }
  index -= stacks_here;
  if (kTalls && index >= singles) {
    const std::int32_t row = cut.stacks * kStackRows + singles * kTileRows;
    return {row, rows - row, column_tile + index - singles, UnitKind::kTall};
  }
  const std::int32_t row = cut.stacks * kStackRows + index * kTileRows;
  const std::int32_t rest = rows - row;
  return {row, rest < kTileRows ? rest : kTileRows, column_tile,
          two_columns ? UnitKind::kSideBySide : UnitKind::kSplit};
}

/// Half of a unit, so that twice as many clusters can take part in a last turn that few have work
/// in: 64 rows a CTA. A unit of no more rows than that is all in half 0.
SWITCHYARD_HOST_DEVICE constexpr Unit half_of(const Unit& unit, std::int32_t half) {
  const std::int32_t room = unit.kind == UnitKind::kSideBySide ? kHalfRows : kTileRows;
  const std::int32_t rest = unit.rows - room * half;
  return {unit.row + room * half, rest < 0 ? 0 : (rest < room ? rest : room), unit.column_tile,
          unit.kind == UnitKind::kSideBySide ? unit.kind : UnitKind::kSplit};
}

/// The cut above, as the walk over the units takes it.
template <bool kTalls>
struct StackCut {
  static constexpr bool kHalves = true;
  SWITCHYARD_HOST_DEVICE static constexpr std::int32_t units_of(std::int32_t rows,
                                                                std::int32_t column_tiles) {
    return switchyard::units_of<kTalls>(rows, column_tiles);
  }
  SWITCHYARD_HOST_DEVICE static constexpr Unit unit_at(std::int32_t index, std::int32_t rows,
                                                       std::int32_t column_tiles) {
    return switchyard::unit_at<kTalls>(index, rows, column_tiles);
  }
};

/// Another cut, for kernels whose weights are the M side: strips of up to 64 rows, about equal.
/// Inside a group of strips these run first, then the columns, while the weights are hot.
struct StripCut {
  static constexpr bool kHalves = false;
  static constexpr std::int32_t kRows = 64;
  static constexpr std::int32_t kPerGroup = 32;

  SWITCHYARD_HOST_DEVICE static constexpr std::int32_t strips(std::int32_t rows) {
    return (rows + kRows - 1) / kRows;
  }
  SWITCHYARD_HOST_DEVICE static constexpr std::int32_t units_of(std::int32_t rows,
                                                                std::int32_t column_tiles) {
    return strips(rows) * column_tiles;
  }
  SWITCHYARD_HOST_DEVICE static constexpr Unit unit_at(std::int32_t index, std::int32_t rows,
                                                       std::int32_t column_tiles) {
    const std::int32_t all = strips(rows);
    const std::int32_t group = index / (kPerGroup * column_tiles);
    const std::int32_t left = all - group * kPerGroup;
    const std::int32_t here = left < kPerGroup ? left : kPerGroup;
    index -= group * kPerGroup * column_tiles;
    const std::int32_t strip = group * kPerGroup + index % here;
    const std::int32_t few = rows / all;
    const std::int32_t more = rows % all;  // strips that have one row more
    return {strip * few + (strip < more ? strip : more), few + (strip < more ? 1 : 0), index / here,
            UnitKind::kStack};
  }
};

/// What one CTA of the two does in a unit.
struct CtaTile {
  std::int32_t row = 0;
  std::int32_t rows = 0;  ///< 0..128 (tall: 129..192); with none it only helps to load the weights.
  std::int32_t column_tile = 0;
  bool share_weights = false;
  bool tall = false;  ///< Half `cta` of the column tile.
};

SWITCHYARD_HOST_DEVICE constexpr CtaTile tile_of(const Unit& unit, std::int32_t cta) {
  if (unit.kind == UnitKind::kSideBySide) {
    return {unit.row, unit.rows, unit.column_tile + cta, false};
  }
  if (unit.kind == UnitKind::kTall) return {unit.row, unit.rows, unit.column_tile, false, true};
  const std::int32_t room = unit.kind == UnitKind::kStack ? kTileRows : kHalfRows;
  const std::int32_t rest = unit.rows - room * cta;
  return {unit.row + room * cta, rest < 0 ? 0 : (rest < room ? rest : room), unit.column_tile,
          true};
}

}  // namespace switchyard
