#pragma once

// Selection by the best groups of experts as DeepSeek-V3 has it: when it has a kernel of its own.

#include "route/implementations.hpp"

namespace switchyard::routing {

/// 8 of 256 experts by sigmoid and bias, of at most 4 of 8 groups.
[[nodiscard]] inline bool takes_groups(const RouteArgs& args) {
  if (!args.config.is_top_k()) return false;
  const TopKRouter& router = args.config.as_top_k();
  return args.config.num_experts == 256 && router.groups == 8 && router.top_groups <= 4 &&
         router.top_k == 8 && router.score == Score::kSigmoid && !compares_logits(args);
}

}  // namespace switchyard::routing
