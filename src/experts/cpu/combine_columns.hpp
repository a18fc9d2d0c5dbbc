#pragma once

#include <functional>

#include "experts/cpu/token_parts.hpp"

namespace switchyard::cpu {

/// Neighbouring panels of the second product, and with them columns of the output.
struct ColumnRange {
  std::int64_t first_panel;
  std::int64_t panels;
};

/// Columns of H that a panel really has.
[[nodiscard]] std::int64_t columns_of(const CpuExpertWeights& weights, std::int64_t panel);

/// Sums that are open at the same time while a subtree is added up: log2 of its leaves + 1.
[[nodiscard]] std::int64_t combine_slots(const ReducedRows& reduced);

struct CombineColumnsArgs {
  const ExpertsArgs* call;
  const WorkList* work;
  const TokenParts* parts;
  std::int64_t part;
  ColumnRange columns;
  /// Multiplies blocks of an active expert: `product` [panels, places, panel_cols] out.
  const std::function<void(std::size_t index, const PartRows& rows, float* product)>* multiply;
  float* product;
  float* stack;  ///< combine_slots() times [panels, tokens of the part, panel_cols].
};

/// The weighted sums of these columns of a part's tokens over all experts in the fixed order
/// (combine.hpp), written to the call's `reduced`.
void combine_columns(const CombineColumnsArgs& args);

}  // namespace switchyard::cpu
