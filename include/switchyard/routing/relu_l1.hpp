#pragma once

#include <cstdint>

#include "switchyard/execution.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

// The penalty of a ReLU router (ReluRouter), whose coefficient a controller steers so that K
// experts work for a token on average, and experts that work more than others are dearer.
// Source: ReMoE, Wang et al. 2024 (arXiv:2412.14711) section 3.3.

struct ReluL1Args {
  Matrix<const float> logits{};  ///< [T, E].
  std::int32_t top_k = 0;        ///< K that is aimed at; 0: the plain L1 norm, f_e = 1/E.
  double scale = 1;              ///< Of the gradient: the coefficient.
  /// [T, E] the gradient is added to what is there, for example for BackwardArgs::dlogits; or
  /// empty.
  Matrix<float> dlogits{};
  Execution execution{};
};

struct ReluL1 {
  double value = 0;   ///< E sum_e f_e mean_t relu(l_te), f_e = n_e / (T K), n_e logits above 0.
  double active = 0;  ///< Experts of a token, on average.
};

/// f is a constant: dL/dl_te = E f_e / T where l_te > 0. Sums are in double and in an order that
/// depends on T alone. On the backend cpu.
/// @throws Error{kInvalidArgument}: shapes disagree, top_k is not in [0, E]; {kUnsupported}.
ReluL1 relu_l1(const ReluL1Args& args);

/// The coefficient of the next step: times `factor` where more than top_k experts work for a token
/// on average, else divided by it. It begins at 1e-8.
[[nodiscard]] constexpr double next_l1_coefficient(double coefficient, double active,
                                                   std::int32_t top_k, double factor = 1.2) {
  return active > top_k ? coefficient * factor : coefficient / factor;
}

}  // namespace switchyard
