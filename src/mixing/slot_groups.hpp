#pragma once

// Which groups of tokens make slots, and who reads them: the dense sibling of a plan.

#include <cstdint>

#include "switchyard/plan.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard {

class SlotGroups {
 public:
  static constexpr std::int64_t kNone = -1;

  /// @throws Error{kInvalidArgument} that names a group or sequence that does not divide, and what.
  SlotGroups(const SoftMoeConfig& config, std::int64_t num_tokens, std::int32_t num_experts);

  [[nodiscard]] std::int64_t tokens() const { return tokens_; }  ///< m of a group.
  [[nodiscard]] std::int64_t count() const { return count_; }    ///< Groups of tokens.
  /// B, the sets of S slots that somebody reads.
  [[nodiscard]] std::int64_t num_sets() const {
    return per_sequence_ == 0 ? 0 : count_ / per_sequence_ * sets_per_sequence();
  }
  [[nodiscard]] std::int64_t slots() const { return num_experts_ * per_expert_; }  ///< S of a set.
  [[nodiscard]] std::int64_t slots_per_expert() const { return per_expert_; }      ///< p.
  [[nodiscard]] std::int64_t num_experts() const { return num_experts_; }
  [[nodiscard]] std::int64_t num_tokens() const { return count_ * tokens_; }
  [[nodiscard]] std::int64_t per_sequence() const { return per_sequence_; }  ///< Groups of one.
  [[nodiscard]] bool causal() const { return causal_; }
  [[nodiscard]] std::int64_t first_token(std::int64_t group) const { return group * tokens_; }

  /// The set that the group's tokens are mixed into, or kNone: nobody would read it.
  [[nodiscard]] std::int64_t makes(std::int64_t group) const {
    const std::int64_t place = group % per_sequence_;
    return place < sets_per_sequence() ? set_at(group, place) : kNone;
  }
  /// The set that the group's tokens read, or kNone.
  [[nodiscard]] std::int64_t reads(std::int64_t group) const {
    const std::int64_t place = group % per_sequence_ - (causal_ ? 1 : 0);
    return place >= 0 ? set_at(group, place) : kNone;
  }

  /// The row of the experts' layout that slot `slot` of a set has: rows of an expert are those of
  /// all sets, one after the other.
  [[nodiscard]] std::int64_t row_of(std::int64_t set, std::int64_t slot) const {
    const std::int64_t expert = slot / per_expert_;
    return (expert * num_sets() + set) * per_expert_ + slot % per_expert_;
  }
  /// The plan of the experts, whose tokens are the slots of all sets [B*S], each with one row of
  /// weight 1.
  [[nodiscard]] PlanView plan_into(Plan& memory) const;

 private:
  [[nodiscard]] std::int64_t sets_per_sequence() const {
    return per_sequence_ - (causal_ && per_sequence_ > 0 ? 1 : 0);
  }
  [[nodiscard]] std::int64_t set_at(std::int64_t group, std::int64_t place) const {
    return group / per_sequence_ * sets_per_sequence() + place;
  }

  std::int64_t per_expert_;
  std::int64_t num_experts_;
  bool causal_;
  std::int64_t tokens_ = 0;
  std::int64_t count_ = 0;
  std::int64_t per_sequence_ = 0;  ///< Groups of a sequence.
};

}  // namespace switchyard
