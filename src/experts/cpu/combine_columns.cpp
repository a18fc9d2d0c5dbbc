// The fused combine: one thread adds up its columns over all experts while their products are still
// in cache. Leaf by leaf of the tree, each finished pair of neighbours merged at once, so that a
// stack of a few sums is enough.
#include "experts/cpu/combine_columns.hpp"

#include <algorithm>
#include <bit>

#include "core/row_ops.hpp"

namespace switchyard::cpu {
namespace {

/// Groups of the subtree, padded to a power of two.
std::int64_t tree_leaves(const ReducedRows& reduced) {
  const auto groups = static_cast<std::uint64_t>(reduced.subtree.num_groups);
  return static_cast<std::int64_t>(std::bit_ceil(groups));
}

class Combine {
 public:
  explicit Combine(const CombineColumnsArgs& args)
      : args_(args),
        call_(*args.call),
        weights_(static_cast<const CpuExpertWeights&>(*call_.weights)),
        kernels_(weights_.kernels()),
        first_token_(args.parts->first_token(args.part)),
        num_tokens_(args.parts->num_tokens(args.part)),
        size_(num_tokens_ * args.columns.panels * kernels_.panel_cols) {}

  /// Adding the +0 of an absent group is not skipped: it turns a -0 into +0.
  void subtree() {
    const std::int64_t leaves = tree_leaves(call_.reduced);
    for (std::int64_t leaf = 0; leaf < leaves; ++leaf) {
      const auto index = static_cast<std::uint64_t>(leaf);
      float* sums = args_.stack + std::popcount(index) * size_;
      group(leaf, sums);
      for (int merges = std::countr_one(index); merges > 0; --merges, sums -= size_) {
        for (std::int64_t i = 0; i < size_; ++i) sums[i - size_] += sums[i];
      }
    }
    store(0, 1);
  }

  void each_group() {
    const std::int64_t groups = call_.reduced.subtree.num_groups;
    for (std::int64_t leaf = 0; leaf < groups; ++leaf) {
      group(leaf, args_.stack);
      store(leaf, groups);
    }
  }

 private:
  /// A group's sums from +0: the active experts from next_ on whose id belongs to it.
  void group(std::int64_t leaf, float* sums) {
    // Not memset: without tokens there is no buffer, and it may not be told so.
    std::fill_n(sums, size_, 0.0F);
    const Subtree& tree = call_.reduced.subtree;
    if (leaf >= tree.num_groups) return;
    const std::int32_t end =
        tree.order.begin(tree.first_group + static_cast<std::int32_t>(leaf) + 1);
    for (; next_ < args_.work->active.size(); ++next_) {
      const ActiveExpert& active = args_.work->active[next_];
      if (weights_.first_expert() + active.expert >= end) break;
      const PartRows& rows = args_.parts->rows(args_.part, next_);
      if (rows.blocks == 0) continue;
      (*args_.multiply)(next_, rows, args_.product);
      const RowBlocks blocks = active.blocks.part(rows.first_block, rows.blocks);
      const std::int64_t before = rows.first - active.blocks.begin(rows.first_block);
      const std::int64_t first_row = active.first_row + rows.first;
      for (std::int64_t p = 0; p < args_.columns.panels; ++p) {
        const std::int64_t panel = args_.columns.first_panel + p;
        kernels_.reduce(
            {.product = args_.product + (p * blocks.places() + before) * kernels_.panel_cols,
             .bias = weights_.second_bias(active.expert, panel),
             .token = call_.plan.row_token.data + first_row,
             .weight = call_.plan.row_weight.data + first_row,
             .rows = rows.count,
             .first_token = first_token_,
             .sums = sums + p * num_tokens_ * kernels_.panel_cols});
      }
    }
  }

  /// Token t's columns go to row t * rows_per_token + offset.
  void store(std::int64_t offset, std::int64_t rows_per_token) const {
    const RawMatrix& out = call_.reduced.sums;
    const float* sums = args_.stack;
    for (std::int64_t p = 0; p < args_.columns.panels; ++p) {
      const std::int64_t panel = args_.columns.first_panel + p;
      const std::int64_t cols = columns_of(weights_, panel);
      for (std::int64_t t = 0; t < num_tokens_; ++t, sums += kernels_.panel_cols) {
        std::byte* to = out.row((first_token_ + t) * rows_per_token + offset) +
                        panel * kernels_.panel_cols * size_of(out.dtype);
        row_ops::narrow(out.dtype, sums, to, cols);
      }
    }
  }

  const CombineColumnsArgs& args_;
  const ExpertsArgs& call_;
  const CpuExpertWeights& weights_;
  const Kernels& kernels_;
  const std::int64_t first_token_;  ///< Of the part.
  const std::int64_t num_tokens_;
  const std::int64_t size_;  ///< Floats of one sum.
  std::size_t next_ = 0;     ///< Of the active experts.
};

}  // namespace

std::int64_t columns_of(const CpuExpertWeights& weights, std::int64_t panel) {
  const std::int64_t cols = weights.kernels().panel_cols;
  return std::min(weights.config().hidden - panel * cols, cols);
}

std::int64_t combine_slots(const ReducedRows& reduced) {
  return static_cast<std::int64_t>(
      std::bit_width(static_cast<std::uint64_t>(tree_leaves(reduced))));
}

void combine_columns(const CombineColumnsArgs& args) {
  Combine combine(args);
  if (args.call->reduced.each_group) {
    combine.each_group();
  } else {
    combine.subtree();
  }
}

}  // namespace switchyard::cpu
