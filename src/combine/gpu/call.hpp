#pragma once

// What the combines on a GPU have in common.

#include <cstdint>
#include <optional>
#include <string>

#include "combine/implementations.hpp"

namespace switchyard::combining {

inline constexpr int kMaxGroups = 64;
inline constexpr int kMaxBlockRows = 512;

/// Why no combine on a GPU takes these, if so.
[[nodiscard]] std::optional<std::string> reject_on_gpu(const CombineArgs& args);

/// The same for those that need to know how many rows a token has at most (PlanView::most_rows).
[[nodiscard]] std::optional<std::string> reject_of_known_rows(const CombineArgs& args);

/// What every combine's parameters have of a call, by the same names.
template <typename Params>
void set_call(Params& params, const CombineArgs& args) {
  params.rows = args.rows.data;
  params.sums = args.reduced.sums.data;
  params.expert_begin = args.plan.expert_begin.data;
  params.row_weight = args.plan.row_weight.data;
  params.token_begin = args.plan.token_begin.data;
  params.token_row = args.plan.token_row.data;
  params.num_groups = args.reduced.subtree.num_groups;
}

/// border[g]: the local expert at which group g + 1 begins.
void find_borders(const CombineArgs& args, std::int32_t (&border)[kMaxGroups]);

}  // namespace switchyard::combining
