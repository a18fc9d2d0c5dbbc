#pragma once

#include "core/shape_check.hpp"
#include "switchyard/combine.hpp"

namespace switchyard {

/// The most leaves of a tree of sums: far more ranks times groups than any layer has.
inline constexpr std::int32_t kMaxLeaves = 4096;

/// Where weighted sums of a plan's rows go, for combine() and for experts that combine: a subtree
/// that there can be, room for every sum, and experts [first_expert, first_expert + num_experts) of
/// the plan within the subtree.
inline void require_reduced(const ReducedRows& reduced, std::int64_t num_tokens,
                            std::int64_t hidden, std::int32_t first_expert,
                            std::int32_t num_experts) {
  const auto& [order, first_group, num_groups] = reduced.subtree;
  require(order.num_experts >= 1, "num_experts={} of the reduction order is not positive",
          order.num_experts);
  require(order.groups >= 1 && order.groups <= kMaxLeaves, "groups={} is not in 1 to {}",
          order.groups, kMaxLeaves);
  require(first_group >= 0 && num_groups >= 1 && first_group <= order.groups - num_groups,
          "groups [{}, {}) of the subtree are not within groups={}", first_group,
          first_group + std::int64_t{num_groups}, order.groups);
  require_float("sums", reduced.sums.dtype);
  require_shape("sums", reduced.sums, num_tokens * (reduced.each_group ? num_groups : 1), hidden);
  const std::int32_t begin = order.begin(first_group);
  const std::int32_t end = order.begin(first_group + num_groups);
  require(num_experts == 0 || (first_expert >= begin && first_expert + num_experts <= end),
          "experts [{}, {}) of the plan are not within [{}, {}) of the subtree", first_expert,
          first_expert + num_experts, begin, end);
}

}  // namespace switchyard
