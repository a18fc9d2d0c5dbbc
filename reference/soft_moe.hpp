#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/routing/soft_moe.hpp"

// Soft-MoE by its definition, in double, without a rounding in between. Gradients are held by
// differences of this.

namespace switchyard::reference {

struct SoftMoeProblem {
  SoftMoeConfig config{};
  double scale = 1;  ///< In the place of config.scale.
  ExpertConfig experts{};
  std::int64_t num_tokens = 0;
  std::vector<double> x{};    ///< [T, H].
  std::vector<double> phi{};  ///< [E*p, H].
  std::vector<double> w13{};  ///< [E, 2I, H], plain [E, I, H].
  std::vector<double> w2{};   ///< [E, H, I].
};

struct SoftMoeResult {
  std::vector<double> y{};         ///< [T, H].
  std::vector<double> dispatch{};  ///< [T, E*p].
  std::vector<double> combine{};   ///< [T, E*p].
};

SoftMoeResult soft_moe(const SoftMoeProblem& problem);

}  // namespace switchyard::reference
