#pragma once

// The gradient of one expert's matrix: a product whose sum runs over the expert's rows.

#include "experts/cpu/backward/operands.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::cpu {

/// out[row_of[m], c] = sum over r of left[r][m] * right[r][c], in ascending r.
struct WeightGradientArgs {
  const Kernels* kernels;
  const std::byte* const* left;  ///< n rows of `left_cols` values of the compute type.
  std::int64_t num_rows;         ///< n.
  std::int64_t left_cols;
  const std::byte* right_panels;  ///< All panels of the right side, as pack_panels_of_rows() leaves
                                  ///< them, one after the other.
  std::int64_t right_cols;
  const std::int64_t* row_of;  ///< [left_cols] row of `out`, -1: none; null: the same.
  RawMatrix out;               ///< [., right_cols].
  bool accumulate;
};

/// A task takes some columns of the left side and all of the right one: its output is whole rows,
/// and what it multiplies with stays in the first two cache levels.
[[nodiscard]] std::int64_t weight_gradient_tasks(const Kernels& kernels, std::int64_t left_cols);
/// Bytes that a task works in.
[[nodiscard]] std::int64_t weight_gradient_scratch(const Kernels& kernels, std::int64_t num_rows);
void run_weight_gradient(const WeightGradientArgs& args, std::int64_t task, std::byte* scratch);

}  // namespace switchyard::cpu
