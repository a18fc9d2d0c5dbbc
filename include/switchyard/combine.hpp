#pragma once

#include <cstdint>

#include "switchyard/execution.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// First expert of share `index` where `num_experts` are dealt out to `shares` neighbours by
/// integer division: reduction groups and ranks alike, so that their borders meet. E for index =
/// shares.
[[nodiscard]] constexpr std::int32_t first_expert_of(std::int64_t num_experts, std::int64_t shares,
                                                     std::int64_t index) {
  return static_cast<std::int32_t>(index * num_experts / shares);
}

/// The fixed order of sums. The experts of the layer form `groups` reduction groups, group g
/// holding [g*E/G, (g+1)*E/G) by integer division. Inside a group rows are added in ascending
/// expert id, then k: acc = fma(weight, y, acc) from +0 in fp32. Groups are added by a fixed binary
/// tree of neighbours, ((0+1)+(2+3))+((4+5)+(6+7)), padded with +0 to a power of two; an absent
/// group is +0.
struct ReductionOrder {
  std::int32_t num_experts = 0;  ///< E, in the whole layer.
  std::int32_t groups = 8;       ///< G >= 1; layers say a power of two.

  /// First expert of group g; begin(G) == E.
  [[nodiscard]] constexpr std::int32_t begin(std::int32_t g) const {
    return first_expert_of(num_experts, groups, g);
  }
};

/// The part of the tree that one rank holds: groups [first_group, first_group + num_groups).
struct Subtree {
  ReductionOrder order{};
  std::int32_t first_group = 0;
  std::int32_t num_groups = 8;
};

/// The subtree of rank `rank` of `num_ranks`, which holds experts [rank*E/R, (rank+1)*E/R): G/R
/// groups where R divides G; else each rank is one group of an order with R groups.
[[nodiscard]] Subtree subtree_of_rank(ReductionOrder order, std::int32_t rank,
                                      std::int32_t num_ranks);

/// Where weighted sums go. With `each_group` every group's partial is rounded to the type of `sums`
/// on its own, one row per (token, group); else a token's row is the sum over the subtree.
struct ReducedRows {
  RawMatrix sums{};  ///< [N, H], or [N * num_groups, H] with each_group; f32, bf16, f16.
  Subtree subtree{};
  bool each_group = false;
};

struct CombineArgs {
  ConstRawMatrix rows{};  ///< [rows of the layout, H] from experts(), unweighted.
  PlanView plan{};
  std::int32_t first_expert = 0;  ///< Global id of the plan's expert 0.
  /// [N, H] or empty: added to a token's whole sum before it is rounded; not with each_group.
  Matrix<const float> added{};
  ReducedRows reduced{};  ///< out.
  Execution execution{};
};

/// Weighted sum of each token's rows by the fixed order; a token without rows gets +0. Rows of
/// padding are never read.
/// @throws Error{kInvalidArgument}: shapes disagree, or something is added to groups.
/// Cost: reads S*H elements of rows, writes N*H.
void combine(const CombineArgs& args);

struct FinishArgs {
  /// Partial rows: row `partial_row[t * R + r]` is the part of rank r for token t, -1: absent (+0).
  /// With `groups_per_row` > 1 the groups of one rank follow each other: row p*groups_per_row + g.
  ConstRawMatrix partials{};
  Matrix<const std::int32_t> partial_row{};  ///< [T, R]; empty: R = 1 and row t is token t's.
  std::int32_t groups_per_row = 1;
  Matrix<const float> shared{};  ///< [T, H] from the shared experts, or empty; added last.
  RawMatrix out{};               ///< [T, H] f32, bf16 or f16: one rounding.
  Execution execution{};
};

/// Home side: add the ranks' (or groups') parts by the binary tree, then the shared experts, then
/// round once to the output's type. R is padded with +0 to a power of two.
/// @throws Error{kInvalidArgument}: shapes disagree.
void finish(const FinishArgs& args);

}  // namespace switchyard
