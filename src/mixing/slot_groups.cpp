#include "mixing/slot_groups.hpp"

#include <algorithm>
#include <limits>

#include "core/check.hpp"

namespace switchyard {

SlotGroups::SlotGroups(const SoftMoeConfig& config, std::int64_t num_tokens,
                       std::int32_t num_experts)
    : per_expert_(config.slots), num_experts_(num_experts), causal_(config.causal) {
  require(config.group >= 0, "group={}, want 0 (all of a sequence) or more", config.group);
  require(config.sequence >= 0, "sequence={}, want 0 (all tokens) or more", config.sequence);
  if (num_tokens == 0) return;
  const std::int64_t sequence = config.sequence == 0 ? num_tokens : config.sequence;
  require(num_tokens % sequence == 0, "sequence={} does not divide the {} tokens", sequence,
          num_tokens);
  tokens_ = config.group == 0 ? sequence : config.group;
  require(sequence % tokens_ == 0, "group={} does not divide the {} tokens of a sequence", tokens_,
          sequence);
  count_ = num_tokens / tokens_;
  per_sequence_ = sequence / tokens_;
  require(num_sets() <= std::numeric_limits<std::int32_t>::max() / slots(),
          "{} groups of {} slots are more rows than an int32 counts", num_sets(), slots());
}

PlanView SlotGroups::plan_into(Plan& memory) const {
  const std::int64_t rows = num_sets() * slots();
  const PlanView view = memory.reserve(rows, 1, static_cast<std::int32_t>(num_experts_), rows);
  const auto rows_per_expert = static_cast<std::int32_t>(num_sets() * per_expert_);
  for (std::int32_t e = 0; e <= num_experts_; ++e) view.expert_begin[e] = e * rows_per_expert;
  std::fill_n(view.expert_rows.data, num_experts_, rows_per_expert);
  std::fill_n(view.row_weight.data, rows, 1.0F);
  for (std::int64_t token = 0; token < rows; ++token) {
    const std::int64_t row = row_of(token / slots(), token % slots());
    view.row_token[row] = static_cast<std::int32_t>(token);
    view.token_begin[token] = static_cast<std::int32_t>(token);
    view.token_row[token] = static_cast<std::int32_t>(row);
  }
  view.token_begin[rows] = static_cast<std::int32_t>(rows);
  return view;
}

}  // namespace switchyard
