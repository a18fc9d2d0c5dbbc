#pragma once

// Plan and experts of a few tokens in one call: one kernel where a plan of its own would stand
// between the routing and the first weights, and no kernel for what the host is told.

#include "core/select.hpp"
#include "experts/gpu/streaming/streaming.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {

/// plan(plan) and experts(experts), and `report` by the last of their kernels; `experts.plan` is
/// `plan.plan`.
struct PlannedExpertsArgs {
  const PlanArgs& plan;
  const ExpertsArgs& experts;
  PlanReport report;
  const Execution& execution;
};

/// What does both at once, or null: then they are two calls.
/// @throws as both.
[[nodiscard]] const Implementation<PlannedExpertsArgs>* find_planned_experts(
    const PlannedExpertsArgs& args);

}  // namespace switchyard
