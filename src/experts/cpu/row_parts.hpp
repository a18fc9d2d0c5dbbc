#pragma once

#include "experts/cpu/kernels/kernels.hpp"

namespace switchyard::cpu {

/// Neighbouring blocks of an expert's rows.
struct RowPart {
  std::int64_t first_row;
  RowBlocks blocks;
};

/// The rows of an expert in parts of about 256, whole blocks each: what a product makes of a part
/// with some panels is used while it is in the second-level cache.
class RowParts {
 public:
  RowParts() = default;
  explicit RowParts(const RowBlocks& blocks, std::int64_t rows_at_once = kRowsAtOnce)
      : blocks_(blocks), count_((blocks.rows() + rows_at_once - 1) / rows_at_once) {}

  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] RowPart operator[](std::int64_t part) const {
    const std::int64_t first = part * blocks_.count() / count_;
    const std::int64_t end = (part + 1) * blocks_.count() / count_;
    return {blocks_.begin(first), blocks_.part(first, end - first)};
  }
  /// Of a part, at most. @param most_rows  Kernels::max_rows.
  [[nodiscard]] std::int64_t most_places(std::int64_t most_rows) const {
    const std::int64_t places = (blocks_.count() + count_ - 1) / count_ * most_rows;
    return places < blocks_.places() ? places : blocks_.places();
  }

 private:
  static constexpr std::int64_t kRowsAtOnce = 256;

  RowBlocks blocks_;
  std::int64_t count_ = 0;
};

}  // namespace switchyard::cpu
