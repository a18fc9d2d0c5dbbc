#pragma once

#include "checkpoint/models.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// The layer that --model, or --hidden --inner --experts --top-k and their kin, describe.
/// @param num_experts  --experts, wherever the command keeps it.
/// @param family       Its routing rule, where there is no --model.
/// @throws UsageError: none or both ways are used, a value breaks a rule.
[[nodiscard]] CheckpointRecipe recipe_of(const Options& options,
                                         std::optional<std::int64_t> num_experts,
                                         std::string_view family);

}  // namespace switchyard::tool
