#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "reference/reference.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// Each element of a layer's output [T, H] of f32 lies within its bound around the reference, which
/// computes in double with the routing that the layer has recorded. The bound follows from the
/// types and the lengths of the sums.
///
/// @param x  [T, H] of f32, and `records` of the ranks, in the order of the tokens.
inline void expect_within_bounds(const LayerModel& model, const LayerOptions& options,
                                 DType compute, const std::vector<float>& x,
                                 const std::vector<RoutingRecord>& records,
                                 const std::vector<float>& out) {
  RoutingRecord all;
  for (const RoutingRecord& record : records) {
    all.expert.insert(all.expert.end(), record.expert.begin(), record.expert.end());
    all.weight.insert(all.weight.end(), record.weight.begin(), record.weight.end());
    all.kept.insert(all.kept.end(), record.kept.begin(), record.kept.end());
  }
  const auto expected = reference::layer_output(model,
                                                {.precision = {.compute = compute},
                                                 .ranks = static_cast<std::int32_t>(records.size()),
                                                 .wire = options.combine_wire,
                                                 .rank_invariant = options.rank_invariant,
                                                 .dispatch_wire = options.dispatch_wire,
                                                 .round_rows = options.backend == Backend::kCuda},
                                                reference::as_computed(x, compute),
                                                {.expert = all.expert,
                                                 .weight = all.weight,
                                                 .kept = all.kept,
                                                 .top_k = model.config.router.top_k()});
  const std::int64_t hidden = model.config.experts.hidden;
  EXPECT_EQ(reference::check_output(expected, hidden, DType::kF32, out), "");
}

}  // namespace switchyard
