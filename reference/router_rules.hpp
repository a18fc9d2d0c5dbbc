#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "reference/bounded.hpp"
#include "switchyard/route.hpp"

namespace switchyard::reference {

// The rules of routers other than top-k, and the noise of all, by their definitions, in double.

/// Tokens [T, H] as the router sees them: with the jitter of a call that draws it, in fp32.
std::vector<double> seen_tokens(const RouterConfig& config, const RouteRequest& request,
                                std::span<const double> tokens, std::int64_t hidden);

/// Logits [T, E] with their noise, of a call that draws it.
/// @param noise_logits  [T, E] of learned noise: what softplus makes its size of.
void add_noise(const RouterConfig& config, const RouteRequest& request,
               std::vector<Bounded>& logits, std::span<const Bounded> noise_logits = {});

/// [T, E] derivatives of logits with learned noise by noise_logits; 0 of a call that draws none.
std::vector<Bounded> noise_slopes(const RouterConfig& config, const RouteRequest& request,
                                  std::span<const Bounded> noise_logits);

/// Empty if expert and weight [T, columns] may be the choice of an fp32 implementation of the rule,
/// which is not top-k: nobody left out who is better by more than the bounds of both, and exactly
/// the experts where there is nothing to round. Else what is wrong.
/// @param logits  [T, E] with their noise; of rules without logits empty.
/// @param selection_bias  [E] of expert-threshold, or empty.
std::string check_rule(const RouterConfig& config, const RouteRequest& request,
                       std::span<const Bounded> logits, std::span<const std::int32_t> expert,
                       std::span<const float> weight, std::span<const float> selection_bias = {});

}  // namespace switchyard::reference
