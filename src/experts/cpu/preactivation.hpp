#pragma once

#include "experts/cpu/weights/weights.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::cpu {

/// One panel of the first product on its way into memory that a backward reads.
struct StorePreactivationArgs {
  const CpuExpertWeights* weights;
  std::int32_t expert;  ///< Local id.
  std::int64_t panel;
  const float* product;  ///< [rows, panel_cols]: gate half, up half; or all gate.
  std::int64_t rows;
  RawMatrix out;  ///< [rows, 2I] (plain [., I]) compute type: gate, then up.
};

/// Adds the bias and rounds to the compute type, for the panel's columns.
void store_preactivation(const StorePreactivationArgs& args);

}  // namespace switchyard::cpu
