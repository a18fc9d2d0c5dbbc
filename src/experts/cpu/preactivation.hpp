#pragma once

#include "experts/cpu/weights/weights.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::cpu {

/// Neighbouring panels of the first product on their way into memory that a backward reads.
struct StorePreactivationArgs {
  const CpuExpertWeights* weights;
  std::int32_t expert;  ///< Local id.
  std::int64_t panel;   ///< The first.
  std::int64_t panels;
  const float* product;  ///< [panels, places, panel_cols]: gate half, up half; or all gate.
  std::int64_t places;   ///< At least `rows`.
  std::int64_t rows;
  RawMatrix out;  ///< [rows, 2I] (plain [., I]) compute type: gate, then up.
};

/// Adds the bias and rounds to the compute type, for the panels' columns.
void store_preactivation(const StorePreactivationArgs& args);

}  // namespace switchyard::cpu
