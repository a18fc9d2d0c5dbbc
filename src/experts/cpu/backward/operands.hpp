#pragma once

// Both operands of the products on the way back, brought into the forms that the forward's kernels
// multiply: rows in blocks, and panels. Nothing here knows of experts.

#include <cstdint>
#include <vector>

#include "experts/cpu/packed_rows.hpp"

namespace switchyard::cpu {

/// `count` rows of equal type somewhere in memory.
using RowPointers = std::vector<const std::byte*>;

/// A product's sum over `depth` values, as the kernels take it.
[[nodiscard]] inline std::int64_t packed_depth(const Kernels& kernels, std::int64_t depth) {
  return (depth + kernels.depth_multiple - 1) / kernels.depth_multiple * kernels.depth_multiple;
}

/// Bytes of a panel of exact weights with that sum; `depth` as packed.
[[nodiscard]] inline std::int64_t panel_bytes(const Kernels& kernels, std::int64_t depth) {
  return depth * kernels.panel_cols * size_of(kernels.dtype);
}

/// Blocks [begin, end) of rows, which are told for all blocks, into `out`, where the first block of
/// all begins.
struct PackBlocksArgs {
  const Kernels* kernels;
  RowBlocks blocks;
  std::int64_t begin, end;
  const std::byte* const* rows;
  std::int64_t cols;
  std::int64_t depth;  ///< As packed.
  std::byte* out;
};
void pack_blocks(const PackBlocksArgs& args);

/// [num_rows, cols] into [cols, num_rows] for columns [first, end); elements of 2 or 4 bytes.
struct TransposeRowsArgs {
  const std::byte* const* rows;
  std::int64_t num_rows;
  std::int64_t first, end;    ///< Columns.
  std::int64_t element;       ///< Bytes.
  std::byte* out;             ///< Column `first` goes here.
  std::int64_t out_elements;  ///< From one column's values to the next one's.
};
void transpose_rows(const TransposeRowsArgs& args);

/// Panels of columns [first_col, first_col + cols) of a matrix whose rows run along the sum.
struct PanelsOfRowsArgs {
  const Kernels* kernels;
  const std::byte* const* rows;
  std::int64_t num_rows;  ///< The sum; up to the packed depth it is filled with zeros.
  std::int64_t first_col;
  std::int64_t cols;  ///< Of all panels; what the last one lacks becomes 0.
  std::byte* out;
  std::int64_t panel_bytes = 0;  ///< From one panel to the next.
};
/// Several panels at a time read lines of a row that are neighbours.
void pack_panels_of_rows(const PanelsOfRowsArgs& args);

/// A panel of the transposed weights: its columns are units [first, first + panel_cols) of the
/// sum of the forward's panels, its sum runs over their columns, panel after panel.
struct TransposedPanelArgs {
  const Kernels* kernels;
  const std::byte* panels;  ///< The forward's.
  PanelShape shape;
  std::int64_t first;
  std::byte* out;
};
void transpose_panels(const TransposedPanelArgs& args);

}  // namespace switchyard::cpu
