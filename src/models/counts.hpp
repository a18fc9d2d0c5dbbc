#pragma once

#include "switchyard/models/config.hpp"

namespace switchyard::models {

/// Useful operations of a layer's experts (router and shared ones too), forward, for a token.
[[nodiscard]] double expert_flops(const ModelConfig& config, std::int32_t layer);

}  // namespace switchyard::models
