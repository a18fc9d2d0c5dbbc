#pragma once

// The way back through the activation, some panels of the intermediate at a time.

#include "experts/cpu/weights/weights.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::cpu {

/// Columns of `panels` panels from `panel` on of the intermediate, for some rows of one expert;
/// columns beyond I are 0. A panel has `width` columns.
struct ActivationBackwardArgs {
  const CpuExpertWeights* weights;
  std::int64_t panel;
  std::int64_t panels;
  const float* dinner;  ///< [panels, places, width] gradients of the unweighted intermediate.
  std::int64_t places;  ///< At least n.
  ConstRawMatrix preactivation;  ///< [n, 2I], plain [n, I], compute type.
  const float* weight;           ///< [n], of the rows.
  RawMatrix inner;  ///< out [n, I up to whole panels] compute type: weight * activation.
  RawMatrix dz;     ///< out [n, J] compute type, in the order of the first product's columns.
  float* dots;      ///< out [panels, dots_stride] <dinner, activation> of each row.
  std::int64_t dots_stride;
};
void activation_backward(const ActivationBackwardArgs& args);

}  // namespace switchyard::cpu
