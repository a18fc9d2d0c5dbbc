#pragma once

#include <algorithm>

#include "core/check.hpp"
#include "switchyard/routing/metrics.hpp"

namespace switchyard {

/// @param expert  [T, K] of the last forward, where the layer's router has made them; else empty.
inline void require_own_routing(const Matrix<const std::int32_t>& expert) {
  require(expert.shape[1] > 0,
          "the layer has no routing to tell of: there was no forward yet, the last one failed, or "
          "its routing was given or saved");
}

/// What a layer tells of a routing; of ranks more than one the imbalance, too.
inline metrics::Routing routing_stats(const metrics::Routed& routed, int num_ranks) {
  return metrics::routing(routed, std::min(num_ranks, routed.num_experts));
}

}  // namespace switchyard
