#pragma once

// The experts of a batch's rows as one kernel.

#include "models/gpu/generation/batch/stages.hpp"

namespace switchyard::models::gpu {

/// Of experts that are so many, and fit.
[[nodiscard]] bool has_whole_experts(std::int32_t num_experts, std::int64_t h, std::int64_t i);
/// Blocks of an expert, as batch_expert_splits() has them.
[[nodiscard]] std::int32_t whole_expert_splits(std::int32_t num_experts, std::int64_t i);
void whole_experts(const BatchExpertsArgs& args);

}  // namespace switchyard::models::gpu
