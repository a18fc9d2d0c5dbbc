#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/routing/losses.hpp"

// Auxiliary losses of a router by their definitions, in double. Gradients are held by differences
// of these.

namespace switchyard::reference {

struct RoutedTokens {
  std::int64_t num_experts = 0;
  std::vector<double> logits{};                      ///< [T, E].
  std::vector<std::vector<std::int32_t>> choices{};  ///< Of each token, in its order; -1: none.
  Score score = Score::kSoftmax;
};

/// @param global_counts  [E] with LossScope::kGlobal.
LossValues loss_values(const RoutedTokens& routed, const LossConfig& config,
                       std::span<const std::int64_t> global_counts = {});

/// [E] as NoisyLoadArgs says; all [T, E].
std::vector<double> noisy_load(std::int64_t num_experts, std::int64_t top_k,
                               std::span<const double> clean, std::span<const double> noisy,
                               std::span<const double> deviation);

/// var / (mean^2 + 1e-10).
double cv_squared(std::span<const double> values);

}  // namespace switchyard::reference
