#pragma once

#include <cstdint>

#include "combine/implementations.hpp"
#include "core/row_ops.hpp"

namespace switchyard {

/// The sum of up to kMaxLeaves neighbours by a binary tree padded with +0, over a block of columns.
/// Leaves come in ascending order; absent ones cost nothing: as an absent leaf is +0, all it can
/// change is a sum of nothing but -0, and that is put right once, at the end.
class SumTree {
 public:
  static constexpr std::int64_t kColumns = 256;

  /// Start over, with at most kColumns columns.
  void begin(std::int64_t columns) {
    columns_ = columns;
    depth_ = 0;
    leaves_ = 0;
  }

  /// Memory for leaf `index`, larger than the last one; fill it before the next call.
  [[nodiscard]] float* add_leaf(std::int32_t index) {
    // The two last subtrees can be added as soon as their common parent ends before this leaf.
    while (depth_ >= 2 &&
           (index_[depth_ - 2] ^ index_[depth_ - 1]) < (index_[depth_ - 1] ^ index)) {
      merge();
    }
    index_[depth_] = index;
    ++leaves_;
    return sums_[depth_++];
  }

  /// The root of a tree of `width` leaves, a power of two; null if all are absent.
  [[nodiscard]] float* root(std::int32_t width) {
    if (depth_ == 0) return nullptr;
    while (depth_ > 1) merge();
    if (leaves_ < width) {
      for (std::int64_t i = 0; i < columns_; ++i) sums_[0][i] += 0.0F;
    }
    return sums_[0];
  }

 private:
  void merge() {
    --depth_;
    row_ops::add(sums_[depth_], sums_[depth_ - 1], columns_);
  }

  static constexpr int kLevels = 14;
  static_assert(kMaxLeaves < 1 << (kLevels - 1));

  std::int64_t columns_ = 0;
  int depth_ = 0;
  std::int32_t leaves_ = 0;
  std::int32_t index_[kLevels] = {};  ///< A leaf of each pending subtree.
  alignas(64) float sums_[kLevels][kColumns];
};

}  // namespace switchyard
