#pragma once

#include "switchyard/models/config.hpp"

namespace switchyard::models {

/// Useful operations of a layer's experts (router and shared ones too), forward, for a token.
[[nodiscard]] double expert_flops(const ModelConfig& config, std::int32_t layer);

/// Numbers of pre-activations (gate and up, of a chain in all its iterations) that a token has in
/// all layers.
[[nodiscard]] double preactivations(const ModelConfig& config);

}  // namespace switchyard::models
