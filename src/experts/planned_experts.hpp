#pragma once

// The experts of a few tokens whose kernel also makes the plan: where a plan of its own would stand
// between the routing and the first weights.

#include "experts/decode.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {

/// plan(plan) and experts(args) in one kernel, and `report` by it; `args.plan` is `plan.plan`.
/// False, and nothing is done, where that kernel does not take the call.
/// @throws as both.
[[nodiscard]] bool run_planned_experts(const PlanArgs& plan, const ExpertsArgs& args,
                                       const PlanReport& report);

}  // namespace switchyard
