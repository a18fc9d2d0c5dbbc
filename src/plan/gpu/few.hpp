#pragma once

// Plan of a few assignments by one block: when, and what it needs.

#include <cstdint>

#include "plan/gpu/plan_params.hpp"

namespace switchyard::planning {

inline constexpr int kMostFew = 64;

/// Whether so few assignments are better compared than sorted; the layout must be compact.
[[nodiscard]] constexpr bool are_few(std::int64_t num_tokens, std::int64_t top_k, bool compact) {
  return compact && num_tokens > 0 && num_tokens * top_k <= kMostFew;
}

/// Of a dense routing and a compact layout, without workspace and blocks: all that a plan of so few
/// needs.
[[nodiscard]] PlanParams params_without_memory(const PlanArgs& args);

}  // namespace switchyard::planning
