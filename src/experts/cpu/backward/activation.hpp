#pragma once

// The way back through the activation, a panel of the intermediate at a time.

#include "experts/cpu/weights/weights.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::cpu {

/// Columns [panel * width, + width) of the intermediate of one expert's n rows, with width that of
/// a panel; columns beyond I are 0.
struct ActivationBackwardArgs {
  const CpuExpertWeights* weights;
  std::int64_t panel;
  const float* dinner;           ///< [n, width] gradients of the unweighted intermediate.
  ConstRawMatrix preactivation;  ///< [n, 2I], plain [n, I], compute type.
  const float* weight;           ///< [n], of the rows.
  RawMatrix inner;  ///< out [n, I up to whole panels] compute type: weight * activation.
  RawMatrix dz;     ///< out [n, J] compute type, in the order of the first product's columns.
  float* dots;      ///< out [n] <dinner, activation>.
};
void activation_backward(const ActivationBackwardArgs& args);

}  // namespace switchyard::cpu
