#pragma once

// How a weights' gradient, a product whose sums run over the rows of an expert, is cut into units:
// pure functions of the experts' row counts, shared by the kernels and by tests on the host.
//
// Every expert has the same tiles of its gradient, with more or fewer rows to sum up. Where the
// fullest expert would set the time, its rows are cut into parts that are summed up side by side
// and added behind that in ascending order; an expert without rows is one part, of zeros.

#include <cstdint>

#include "core/gpu/host_device.hpp"

namespace switchyard {

/// Parts are multiples of so many rows.
constexpr std::int32_t kPartRows = 64;

/// Workers that the cut is made for: two a multiprocessor of the largest chips. A constant, so that
/// bits do not depend on the chip.
constexpr std::int64_t kPartWorkers = 264;

/// Bytes of one part's f32 tile in the workspace.
constexpr std::int64_t kPartTile = 128;
constexpr std::int64_t kPartTileBytes = kPartTile * kPartTile * 4;

/// A weights' gradient [left_cols, right_cols] for each expert.
struct RaggedProblem {
  std::int64_t max_rows = 0;  ///< Of all experts together, at most.
  std::int64_t left_cols = 0;
  std::int64_t right_cols = 0;
};

SWITCHYARD_HOST_DEVICE constexpr std::int64_t tiles_along(std::int64_t cols) {
  return (cols + kPartTile - 1) / kPartTile;
}
SWITCHYARD_HOST_DEVICE constexpr std::int64_t tiles_of(const RaggedProblem& problem) {
  return tiles_along(problem.left_cols) * tiles_along(problem.right_cols);
}

/// Rows of the largest part: half of what a worker would have if all rows were spread evenly, so
/// that the last one costs little; a multiple of kPartRows.
[[nodiscard]] constexpr std::int32_t part_rows(const RaggedProblem& problem) {
  constexpr std::int64_t kFewest = 4 * kPartRows;
  const std::int64_t even = problem.max_rows * tiles_of(problem) / (2 * kPartWorkers);
  const std::int64_t rows = (even + kPartRows - 1) / kPartRows * kPartRows;
  return static_cast<std::int32_t>(rows < kFewest ? kFewest : rows);
}

/// Parts of an expert with `rows` rows where the largest part has `most`.
SWITCHYARD_HOST_DEVICE constexpr std::int32_t parts_of(std::int32_t rows, std::int32_t most) {
  return rows <= most ? 1 : (rows + most - 1) / most;
}

/// Rows [begin, end) of an expert.
struct RowRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

/// Part `part` of parts_of(rows, most): about equal shares.
SWITCHYARD_HOST_DEVICE constexpr RowRange rows_of_part(std::int32_t part, std::int32_t rows,
                                                       std::int32_t most) {
  const std::int32_t parts = parts_of(rows, most);
  const std::int32_t share = ((rows + parts - 1) / parts + kPartRows - 1) / kPartRows * kPartRows;
  const std::int32_t end = (part + 1) * share;
  return {part * share, end < rows ? end : rows};
}

/// Parts that experts with more than one can have at most, all together.
[[nodiscard]] constexpr std::int64_t max_split_parts(const RaggedProblem& problem) {
  const std::int64_t most = part_rows(problem);
  return problem.max_rows <= most ? 0 : 2 * problem.max_rows / most;
}

/// Room for their tiles.
[[nodiscard]] constexpr std::int64_t split_bytes(const RaggedProblem& problem) {
  return max_split_parts(problem) * tiles_of(problem) * kPartTileBytes;
}

}  // namespace switchyard
