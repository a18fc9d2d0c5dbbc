#pragma once

// Made-up layers, tokens and routings of any size, fast to make and the same for the same seed.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/layer.hpp"

namespace switchyard::bench {

/// Weights of standard deviation 1/sqrt(fan-in) (1 with `unit_weights`), biases of 0.1; made while
/// they are read.
[[nodiscard]] std::shared_ptr<const ExpertSource> synthetic_experts(const ExpertConfig& config,
                                                                    DType dtype, std::uint64_t seed,
                                                                    bool unit_weights = false);

/// A whole layer; `router_bias` and `selection_bias` say which of them it has.
[[nodiscard]] LayerModel synthetic_layer(const LayerConfig& config, bool router_bias,
                                         bool selection_bias, DType dtype, std::uint64_t seed);

/// [T, H] standard normal.
[[nodiscard]] std::vector<std::byte> synthetic_tokens(std::int64_t num_tokens, std::int64_t hidden,
                                                      DType dtype, std::uint64_t seed);

/// [T] ids of a vocabulary of 32768, id v as often as 1 / (v + 1): about as words are.
[[nodiscard]] std::vector<std::int32_t> synthetic_token_ids(std::int64_t num_tokens,
                                                            std::uint64_t seed);

struct SyntheticRouting {
  std::vector<std::int32_t> expert;  ///< [T, K].
  std::vector<float> weight;         ///< [T, K].
};

/// Who goes where. "uniform"; "zipf:S": K distinct experts by Gumbel top-k over weights 1/rank^S
/// in a seeded order of the experts; "hot:F": a token has the hot expert with probability F, the
/// others are uniform. Experts are distinct within a token, its weights sum to 1.
[[nodiscard]] SyntheticRouting synthetic_routing(std::int64_t num_tokens, std::int32_t num_experts,
                                                 std::int32_t top_k, std::string_view skew,
                                                 std::uint64_t seed);

/// The exponent S of a skew "zipf:S"; 0 for any other.
[[nodiscard]] double zipf_of(const std::string& skew);

/// As the published fused-MoE table has it: uniform ids that may repeat within a token, standard
/// normal weights.
[[nodiscard]] SyntheticRouting published_routing(std::int64_t num_tokens, std::int32_t num_experts,
                                                 std::int32_t top_k, std::uint64_t seed);

/// Assignments of each expert.
[[nodiscard]] std::vector<std::int64_t> counts_of(const SyntheticRouting& routing,
                                                  std::int32_t num_experts);

}  // namespace switchyard::bench
