#pragma once

#include "core/shape_check.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

/// Arrays of a caller's that are used as a source of experts.
/// @throws Error{kInvalidArgument}: what is missing, or of no type for weights.
inline void check_source(const ExpertConfig& config, DType dtype, const void* w13, const void* w2,
                         const float* b13, const float* b2) {
  check(config);
  require_float("the type of the weights", dtype);
  require(w13 != nullptr && w2 != nullptr, "expert weights are null");
  require(!config.bias || (b13 != nullptr && b2 != nullptr), "expert biases are null");
}

}  // namespace switchyard
