#pragma once

#include "switchyard/backward.hpp"

namespace switchyard {

/// What gradients are asked for of `num_experts` experts that compute in `compute`; `of` stands
/// before their names.
/// @throws Error{kInvalidArgument} that names the gradient with a wrong shape or type.
void check_gradients(const ExpertGradients& gradients, const ExpertConfig& config,
                     std::int64_t num_experts, DType compute, const char* of = "");

}  // namespace switchyard
