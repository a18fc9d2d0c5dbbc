#pragma once

#include <vector>

#include "experts/cpu/work_list.hpp"

namespace switchyard::cpu {

/// Rows of an expert that belong to a part's tokens, and the blocks that they lie in.
struct PartRows {
  std::int64_t first = 0;  ///< Of the expert's rows.
  std::int64_t count = 0;
  std::int64_t first_block = 0;
  std::int64_t blocks = 0;
};

/// The tokens of a call in neighbouring parts. Of many tokens the sums of some columns, and the
/// rows that are added to them, leave the second-level cache before the next expert and the next
/// panel come to them; those of a part stay. A token is in one part, so its sums have the same
/// terms in the same order; a block of rows that two parts share is multiplied in both.
class TokenParts {
 public:
  /// One part where tokens are few, experts have few rows of a part, rows are padded, an expert's
  /// rows are not in the order of their tokens, or weights become numbers anew for each part.
  void find(const ExpertsArgs& args, const WorkList& work, const Kernels& kernels);

  [[nodiscard]] std::int64_t count() const { return std::ssize(first_token_) - 1; }
  [[nodiscard]] std::int64_t first_token(std::int64_t part) const {
    return first_token_[static_cast<std::size_t>(part)];
  }
  [[nodiscard]] std::int64_t num_tokens(std::int64_t part) const {
    return first_token(part + 1) - first_token(part);
  }
  /// Of a part with most.
  [[nodiscard]] std::int64_t most_tokens() const { return most_tokens_; }
  /// That the blocks of one expert take in one part, at most.
  [[nodiscard]] std::int64_t most_places() const { return most_places_; }
  /// Of active expert `index`.
  [[nodiscard]] const PartRows& rows(std::int64_t part, std::size_t index) const {
    return rows_[static_cast<std::size_t>(part) * active_ + index];
  }

 private:
  std::vector<std::int64_t> first_token_;  ///< [parts + 1]
  std::vector<PartRows> rows_;             ///< [parts, active experts]
  std::size_t active_ = 0;
  std::int64_t most_tokens_ = 0;
  std::int64_t most_places_ = 0;
};

}  // namespace switchyard::cpu
