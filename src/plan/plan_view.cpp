// Host memory of a plan: one block of integers, one of weights, that only grow.
#include "core/grow.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {

PlanView Plan::reserve(std::int64_t num_tokens, std::int64_t top_k, std::int32_t num_experts,
                       std::int64_t rows) {
  require(num_tokens >= 0 && top_k >= 0 && num_experts >= 0 && rows >= 0,
          "a plan of {} tokens, top_k={}, {} experts and {} rows", num_tokens, top_k, num_experts,
          rows);
  return reserve_arrays(num_tokens, num_tokens * top_k, top_k, num_experts, rows);
}

PlanView Plan::reserve(const AnyAssignments& assignments, const Layout& layout,
                       std::int32_t num_experts, std::int64_t padded_rows) {
  const auto* const dense = std::get_if<DenseAssignments>(&assignments);
  return reserve_arrays(num_tokens(assignments), num_assignments(assignments),
                        dense == nullptr ? 0 : dense->expert.shape[1], num_experts,
                        max_rows(layout, assignments, num_experts, padded_rows));
}

PlanView Plan::reserve_arrays(std::int64_t num_tokens, std::int64_t num_assignments,
                              std::int64_t most_rows, std::int32_t num_experts, std::int64_t rows) {
  const std::int64_t sizes[] = {std::int64_t{num_experts} + 1, num_experts, rows, num_tokens + 1,
                                num_assignments};
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) total += size;
  grow(ints_, static_cast<std::size_t>(total));
  grow(weights_, static_cast<std::size_t>(rows));
  std::int32_t* next = ints_.data();
  const auto take = [&next](std::int64_t size) {
    const Vector<std::int32_t> part{next, {size}};
    next += size;
    return part;
  };
  view_.num_experts = num_experts;
  view_.expert_begin = take(sizes[0]);
  view_.expert_rows = take(sizes[1]);
  view_.row_token = take(sizes[2]);
  view_.token_begin = take(sizes[3]);
  view_.token_row = take(sizes[4]);
  view_.row_weight = {weights_.data(), {rows}};
  view_.most_rows = most_rows;
  return view_;
}

}  // namespace switchyard
