#pragma once

#include "core/check.hpp"
#include "switchyard/assignments.hpp"

namespace switchyard {

/// Assignments of either shape: one after the other, and where each token's begin.
class ByToken {
 public:
  /// @throws Error{kInvalidArgument}: a list's token_begin does not ascend from 0 to A.
  explicit ByToken(const AnyAssignments& assignments)
      : num_tokens_(switchyard::num_tokens(assignments)), size_(num_assignments(assignments)) {
    std::visit([this](const auto& shape) { take(shape); }, assignments);
  }

  [[nodiscard]] std::int64_t num_tokens() const { return num_tokens_; }
  [[nodiscard]] std::int64_t size() const { return size_; }
  /// The first assignment of a token; of token num_tokens(), their number.
  [[nodiscard]] std::int64_t begin(std::int64_t token) const {
    return token_begin_ == nullptr ? token * top_k_ : token_begin_[token];
  }
  [[nodiscard]] std::int32_t expert(std::int64_t i) const { return expert_[i]; }
  [[nodiscard]] float weight(std::int64_t i) const { return weight_[i]; }

  /// @throws Error{kInvalidArgument} that names the first id outside [-1, num_experts); there is
  ///         one.
  [[noreturn]] void fail_with_first_bad_id(std::int32_t num_experts) const {
    std::int64_t i = 0;
    while (expert_[i] >= -1 && expert_[i] < num_experts) ++i;
    std::int64_t token = 0;
    while (begin(token + 1) <= i) ++token;
    fail(ErrorCode::kInvalidArgument, "expert[{}, {}]={} is not in -1 to {}", token,
         i - begin(token), expert_[i], num_experts - 1);
  }

 private:
  void take(const DenseAssignments& dense) {
    expert_ = dense.expert.data;
    weight_ = dense.weight.data;
    top_k_ = dense.expert.shape[1];
  }

  void take(const AssignmentList& list) {
    expert_ = list.expert.data;
    weight_ = list.weight.data;
    token_begin_ = list.token_begin.data;
    require(token_begin_[0] == 0, "token_begin[0]={}, want 0", token_begin_[0]);
    for (std::int64_t t = 1; t <= num_tokens_; ++t) {
      require(token_begin_[t] >= token_begin_[t - 1],
              "token_begin[{}]={} is less than {} before it", t, token_begin_[t],
              token_begin_[t - 1]);
    }
    require(token_begin_[num_tokens_] == size_, "token_begin[{}]={}, want the {} assignments",
            num_tokens_, token_begin_[num_tokens_], size_);
  }

  std::int64_t num_tokens_, size_;
  std::int64_t top_k_ = 0;
  const std::int32_t* token_begin_ = nullptr;  ///< Of a list.
  const std::int32_t* expert_ = nullptr;
  const float* weight_ = nullptr;
};

}  // namespace switchyard
