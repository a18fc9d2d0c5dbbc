#pragma once

// What a layer asks of the exchange between its ranks, on any backend.

#include "switchyard/dispatch.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// @param compute     Type of the tokens on the wire.
/// @param each_group  Every group's partial sums travel by themselves.
[[nodiscard]] inline ExpertParallelConfig exchange_config(const LayerConfig& config,
                                                          const LayerOptions& options,
                                                          DType compute, bool each_group) {
  return {.num_experts = config.experts.num_experts,
          .top_k = config.router.top_k(),
          .hidden = config.experts.hidden,
          .max_tokens = options.max_tokens,
          .dtype = compute,
          .dispatch_wire = options.dispatch_wire,
          .combine_wire = options.combine_wire,
          .reduction_groups = config.reduction_groups,
          .rank_invariant = each_group};
}

}  // namespace switchyard
