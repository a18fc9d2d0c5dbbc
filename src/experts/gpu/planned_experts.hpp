#pragma once

// Plan and experts of a few tokens in one call: one kernel where a plan of its own would stand
// between the routing and the first weights, and no kernel for what the host is told.

#include "experts/gpu/streaming/streaming.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {

/// plan(plan) and experts(args) by the kernels that stream weights, and `report` by the last of
/// them; `args.plan` is `plan.plan`. False, and nothing is done, where these do not take the call.
/// @throws as both.
[[nodiscard]] bool run_planned_experts(const PlanArgs& plan, const ExpertsArgs& args,
                                       const PlanReport& report);

}  // namespace switchyard
