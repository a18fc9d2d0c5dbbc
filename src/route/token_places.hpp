#pragma once

// Assignments in either form, token by token.

#include "core/id_check.hpp"
#include "switchyard/assignments.hpp"

namespace switchyard {

/// Ids and weights of all assignments one behind the other, and which are a token's.
class TokenPlaces {
 public:
  explicit TokenPlaces(const AnyAssignments& assignments) : num_tokens_(num_tokens(assignments)) {
    if (const auto* dense = std::get_if<DenseAssignments>(&assignments)) {
      expert_ = flat(dense->expert);
      weight_ = flat(dense->weight);
      top_k_ = dense->expert.shape[1];
      return;
    }
    const auto& list = std::get<AssignmentList>(assignments);
    expert_ = list.expert;
    weight_ = list.weight;
    token_begin_ = list.token_begin.data;
  }

  [[nodiscard]] std::int64_t size() const { return num_tokens_; }
  /// Places of token t: [begin(t), begin(t + 1)), in the order of its choice.
  [[nodiscard]] std::int64_t begin(std::int64_t t) const {
    return token_begin_ != nullptr ? token_begin_[t] : t * top_k_;
  }
  [[nodiscard]] const Vector<const std::int32_t>& expert() const { return expert_; }
  [[nodiscard]] const Vector<const float>& weight() const { return weight_; }

 private:
  std::int64_t num_tokens_;
  std::int64_t top_k_ = 0;
  const std::int32_t* token_begin_ = nullptr;
  Vector<const std::int32_t> expert_{};
  Vector<const float> weight_{};
};

/// Host memory: ids in [-1, E), a list's tokens one behind the other.
inline void require_assignments(const AnyAssignments& assignments, std::int32_t num_experts) {
  if (const auto* dense = std::get_if<DenseAssignments>(&assignments)) {
    require_ids("expert", dense->expert, num_experts);
    return;
  }
  const auto& list = std::get<AssignmentList>(assignments);
  require_ids("expert", {list.expert.data, {list.expert.shape[0], 1}}, num_experts);
  const std::int64_t last = num_tokens(list);
  require(last >= 0, "token_begin is empty, want [T+1]");
  require(list.token_begin[0] == 0 && list.token_begin[last] == list.expert.shape[0],
          "token_begin goes from {} to {}, want from 0 to {}", list.token_begin[0],
          list.token_begin[last], list.expert.shape[0]);
  for (std::int64_t t = 0; t < last; ++t) {
    require(list.token_begin[t] <= list.token_begin[t + 1], "token_begin[{}]={} exceeds the next",
            t, list.token_begin[t]);
  }
}

}  // namespace switchyard
