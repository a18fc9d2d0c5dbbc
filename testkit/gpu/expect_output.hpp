#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "reference/reference.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// The first element of a layer's output [T, H] of f32 that lies outside of its bound around the
/// reference, or nothing. The reference computes in double with the routing that the layer has
/// recorded, and the bound follows from the types and the lengths of the sums.
///
/// @param x  [T, H] of f32, and `records` of the ranks, in the order of the tokens.
inline std::string outside_of_bounds(const LayerModel& model, const LayerOptions& options,
                                     DType compute, const std::vector<float>& x,
                                     const std::vector<RoutingRecord>& records,
                                     const std::vector<float>& out) {
  RoutingRecord all;
  for (const RoutingRecord& record : records) {
    all.expert.insert(all.expert.end(), record.expert.begin(), record.expert.end());
    all.weight.insert(all.weight.end(), record.weight.begin(), record.weight.end());
    all.kept.insert(all.kept.end(), record.kept.begin(), record.kept.end());
  }
  using reference::Fp8Rows;
  const bool is_cuda = options.backend == Backend::kCuda;
  const auto expected = reference::layer_output(
      model,
      {.precision = {.compute = compute,
                     .may_scale_sums = is_cuda && options.weights == WeightFormat::kE4M3},
       .ranks = static_cast<std::int32_t>(records.size()),
       .wire = options.combine_wire,
       .rank_invariant = options.rank_invariant,
       .dispatch_wire = options.dispatch_wire,
       .fp8_rows = options.compute != DType::kF8E4M3 ? Fp8Rows::kNone
                   : options.batch_invariant         ? Fp8Rows::kAll
                                                     : Fp8Rows::kPerhaps,
       .round_rows = is_cuda},
      reference::as_computed(x, compute),
      {.expert = all.expert,
       .weight = all.weight,
       .kept = all.kept,
       .top_k = model.config.router.top_k()});
  return reference::check_output(expected, model.config.experts.hidden, DType::kF32, out);
}

inline void expect_within_bounds(const LayerModel& model, const LayerOptions& options,
                                 DType compute, const std::vector<float>& x,
                                 const std::vector<RoutingRecord>& records,
                                 const std::vector<float>& out) {
  EXPECT_EQ(outside_of_bounds(model, options, compute, x, records, out), "");
}

}  // namespace switchyard
