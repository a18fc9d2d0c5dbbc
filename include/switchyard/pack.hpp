#pragma once

#include "switchyard/execution.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

struct PackArgs {
  ConstRawMatrix x{};  ///< [N, H].
  PlanView plan{};
  RawMatrix rows{};  ///< out [rows of the layout, H], the type of x; padding rows become +0.
  Execution execution{};
};

/// Gather the rows of x into the order of the plan. The experts gather while loading, so a layer
/// does not need this; those who bring their own GEMM do, and the padded and aligned layouts.
/// @throws Error{kInvalidArgument}: shapes or dtypes disagree.
/// Cost: reads and writes S*H elements.
void pack(const PackArgs& args);

}  // namespace switchyard
