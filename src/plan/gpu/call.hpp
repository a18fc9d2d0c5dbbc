#pragma once

// What the plans on a GPU have in common: what they ask for, and what their kernels are given.

#include <cstdint>
#include <optional>
#include <string>

#include "plan/gpu/plan_params.hpp"

namespace switchyard::planning {

/// Why no plan on a GPU can be made of these, if so.
[[nodiscard]] std::optional<std::string> reject_on_gpu(const PlanArgs& args);

struct PlanCall {
  PlanParams params;
  std::int32_t blocks;  ///< Of the kernel that takes every layout.
};

/// @throws Error{kInvalidArgument}: what is written, or the workspace, has no room.
[[nodiscard]] PlanCall prepare(const PlanArgs& args);

}  // namespace switchyard::planning
