#pragma once

// What is summed beside the products: the gradients of rows' weights and of biases.

#include "experts/cpu/backward/operands.hpp"
#include "switchyard/backward.hpp"

namespace switchyard::cpu {

/// The row of W13 (gate rows, then up rows) that column `j` of the first product's panels, counted
/// through, belongs to; -1: to none.
[[nodiscard]] std::int64_t row_of_column(const CpuExpertWeights& weights, std::int64_t j);

/// One expert's rows.
struct RowSumsArgs {
  const ExpertsBackwardArgs* call;
  std::int32_t expert;      ///< Local id.
  const RowPointers* dout;  ///< [n] rows [H] of the compute type.
  const RowPointers* dz;    ///< [n] rows of the first product's columns, compute type.
  const float* dots;        ///< [pieces, n] parts of <a', a>.
  std::int64_t pieces;
};

/// drow_weight = sum of the pieces + <dout, b2>.
void sum_row_weights(const RowSumsArgs& args);
/// db13 = sums of dz, db2 = sums of weight * dout, over the rows in ascending order.
void sum_bias_gradients(const RowSumsArgs& args);
/// Zeros for an expert without rows.
void clear_gradients(const ExpertsBackwardArgs& call, std::int32_t expert);

}  // namespace switchyard::cpu
