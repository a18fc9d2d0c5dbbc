#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "switchyard/combine.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/pack.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/route.hpp"
#include "verify/problem.hpp"

namespace switchyard::verify {

/// The stages that are checked: the library's, or what a test of the checks puts in their place.
struct StageCalls {
  std::function<void(const RouteArgs&)> route = switchyard::route;
  std::function<std::int64_t(double, std::int64_t, std::int64_t, std::int64_t)> capacity_of =
      switchyard::capacity_of;
  std::function<void(const CapacityArgs&)> apply_capacity = switchyard::apply_capacity;
  std::function<void(const PlanArgs&)> plan = switchyard::plan;
  std::function<void(const PackArgs&)> pack = switchyard::pack;
  std::function<void(const CombineArgs&)> combine = switchyard::combine;
  std::function<void(const FinishArgs&)> finish = switchyard::finish;
};

/// Who does what, after capacity.
struct KeptRouting {
  std::vector<std::int32_t> expert{};  ///< [T, K].
  std::vector<float> weight{};         ///< [T, K].
  std::vector<std::uint8_t> kept{};    ///< [T, K].
};

/// route and apply_capacity; leaves what they decided in `routing` (or what was given).
[[nodiscard]] std::string check_routing_stages(const Problem& problem, const StageCalls& calls,
                                               const Execution& execution, KeptRouting& routing);

/// plan, pack, combine and finish of that routing.
[[nodiscard]] std::string check_row_stages(const Problem& problem, const StageCalls& calls,
                                           const Execution& execution, const KeptRouting& routing);

}  // namespace switchyard::verify
