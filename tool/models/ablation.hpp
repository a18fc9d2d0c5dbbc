#pragma once

// `evaluate --ablate`: what a model loses where its routing is not followed.

#include <nlohmann/json_fwd.hpp>

#include "switchyard/models/ablation.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// Of the options of the command line, which have been checked.
[[nodiscard]] models::AblationOptions ablation_options(const Options& options);

/// "12 forwards of 16384 tokens, about 9 s". @param tokens_per_s  Of the evaluation before.
void announce(const models::AblationCost& cost, double tokens_per_s);

/// Differences to the routing as it is, nats a byte, with the bootstrap over blocks of the text.
[[nodiscard]] nlohmann::json to_json(const models::Ablations& found,
                                     const models::AblationCost& cost);
void print(const models::Ablations& found, const models::AblationOptions& options);

}  // namespace switchyard::tool
