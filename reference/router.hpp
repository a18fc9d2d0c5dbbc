#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "reference/bounded.hpp"
#include "switchyard/route.hpp"

namespace switchyard::reference {

/// A router's matrices, as a layer holds them.
struct RouterWeights {
  std::span<const float> gate{};            ///< [E, H], of a network [E, D].
  std::span<const float> bias{};            ///< [E], or empty.
  std::span<const float> selection_bias{};  ///< [E], or empty.
  std::span<const float> network{};         ///< LayerModel::router_network, or empty.
};

/// [T, E] logits of tokens [T, H], which are already values of the compute type.
std::vector<Bounded> router_logits(std::span<const double> tokens, std::int64_t hidden,
                                   std::int32_t num_experts, const RouterWeights& weights);

/// What one token thinks of each expert.
struct TokenScores {
  std::vector<Bounded> unbiased;   ///< [E] softmax probability, or sigmoid.
  std::vector<Bounded> selection;  ///< [E] what the choice goes by.
};

TokenScores token_scores(const RouterConfig& config, std::span<const Bounded> logits,
                         std::span<const float> selection_bias);

/// [groups] what each group of experts is worth.
std::vector<Bounded> group_scores(const RouterConfig& config, std::span<const Bounded> selection);

/// The largest unbiased score over all experts.
Bounded top_score(const TokenScores& scores);

/// Score::kSparseMixer: of the choice `chosen` the share of each of `candidates`, all that no
/// larger choice took; its own is its weight.
std::vector<Bounded> mixer_shares(std::span<const Bounded> logits,
                                  std::span<const std::int32_t> candidates, std::int32_t chosen);

/// The K best selection scores by value, ties to the lower expert id, in descending order.
std::vector<std::int32_t> choose(const RouterConfig& config, const TokenScores& scores);

/// The weights of the experts that were chosen, whoever chose them.
std::vector<Bounded> chosen_weights(const RouterConfig& config, std::span<const Bounded> logits,
                                    std::span<const std::int32_t> chosen);

/// Experts with the same number are certain to have bitwise equal selection scores: of one token,
/// because logit and selection bias are equal; of all tokens, because the rows of the gate are.
std::vector<std::int32_t> tie_classes(std::span<const Bounded> logits,
                                      std::span<const float> selection_bias);
std::vector<std::int32_t> tie_classes(std::int64_t hidden, std::int32_t num_experts,
                                      const RouterWeights& weights);

/// The certain ties of a token: those of its logits where all are exact (a token of zeros), else
/// those of the gate.
std::vector<std::int32_t> token_ties(std::span<const std::int32_t> gate_ties,
                                     std::span<const Bounded> logits,
                                     std::span<const float> selection_bias);

/// Empty if `chosen` may be the choice of an fp32 implementation: K different experts in descending
/// selection score, no expert left out that is better by more than the bounds of both, no group
/// used that cannot be among the best, and certain ties decided for the lower id. Else what is
/// wrong.
std::string check_choice(const RouterConfig& config, const TokenScores& scores,
                         std::span<const std::int32_t> ties, std::span<const std::int32_t> chosen);

/// What is left of a token's choice where experts that `load` tokens have chosen before, of those
/// `capacity` have room for, are full: they score less than all others, and are alike to none.
void leave_out_full(std::span<const std::int64_t> load, std::int64_t capacity, TokenScores& scores,
                    std::vector<std::int32_t>& ties);

/// Empty if each weight lies within the bound of chosen_weights().
std::string check_weights(std::span<const Bounded> expected, std::span<const float> weights);

}  // namespace switchyard::reference
