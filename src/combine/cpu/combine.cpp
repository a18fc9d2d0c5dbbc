// Combine on a CPU: a token's rows are added group by group in the plan's order, ascending expert,
// and the groups by the tree. Bound by reading the rows; tokens are split over the threads, columns
// into blocks whose sums stay in the first cache level.
#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "combine/cpu/sum_tree.hpp"
#include "combine/implementations.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"
#include "core/tree_width.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kTokensPerTask = 16;

/// A run of a token's rows that belong to one group.
struct GroupRows {
  std::int32_t group;  ///< Within the subtree.
  const std::int32_t* begin;
  const std::int32_t* end;
};

/// First row of the layout of each group of the subtree, and of what follows.
std::vector<std::int32_t> group_borders(const CombineArgs& args) {
  const Subtree& subtree = args.reduced.subtree;
  std::vector<std::int32_t> borders;
  for (std::int32_t g = 0; g <= subtree.num_groups; ++g) {
    const std::int32_t expert = subtree.order.begin(subtree.first_group + g) - args.first_expert;
    borders.push_back(args.plan.expert_begin[std::clamp(expert, 0, args.plan.num_experts)]);
  }
  return borders;
}

class TokenCombiner {
 public:
  TokenCombiner(const CombineArgs& args, const std::vector<std::int32_t>& borders)
      : args_(args), borders_(borders) {}

  void operator()(std::int64_t token) {
    find_groups(token);
    const ReducedRows& reduced = args_.reduced;
    const std::int64_t num_groups = reduced.subtree.num_groups;
    const std::int64_t hidden = args_.rows.cols;
    for (std::int64_t column = 0; column < hidden; column += SumTree::kColumns) {
      const std::int64_t columns = std::min(SumTree::kColumns, hidden - column);
      tree_.begin(columns);
      if (reduced.each_group) {
        for (std::int64_t g = 0; g < num_groups; ++g) {
          store(token * num_groups + g, column, nullptr, columns);
        }
      }
      for (const GroupRows& group : groups_) {
        float* sum = tree_.add_leaf(group.group);
        std::fill_n(sum, columns, 0.0F);
        for (const std::int32_t* row = group.begin; row != group.end; ++row)
          add(*row, column, sum, columns);
        if (!reduced.each_group) continue;
        store(token * num_groups + group.group, column, sum, columns);
        tree_.begin(columns);
      }
      if (!reduced.each_group) {
        const float* const root = tree_.root(tree_width(reduced.subtree.num_groups));
        store(token, column, with_added(token, column, root, columns), columns);
      }
    }
  }

 private:
  void find_groups(std::int64_t token) {
    groups_.clear();
    const std::int32_t* row = args_.plan.token_row.data + args_.plan.token_begin[token];
    const std::int32_t* const end = args_.plan.token_row.data + args_.plan.token_begin[token + 1];
    for (std::int32_t g = 0; row != end && g < args_.reduced.subtree.num_groups; ++g) {
      const std::int32_t* const first = row;
      while (row != end && *row < borders_[static_cast<std::size_t>(g) + 1]) ++row;
      if (row != first) groups_.push_back({g, first, row});
    }
  }

  void add(std::int32_t row, std::int64_t column, float* sum, std::int64_t columns) const {
    const ConstRawMatrix& rows = args_.rows;
    row_ops::accumulate(rows.dtype, args_.plan.row_weight[row],
                        rows.row(row) + column * size_of(rows.dtype), sum, columns);
  }

  /// The sum (null: none), or with what is added to it.
  [[nodiscard]] const float* with_added(std::int64_t token, std::int64_t column, const float* sum,
                                        std::int64_t columns) {
    if (args_.added.data == nullptr) return sum;
    const float* const added = args_.added.data + token * args_.rows.cols + column;
    if (sum == nullptr) {
      std::transform(added, added + columns, sum_.begin(), [](float x) { return 0.0F + x; });
      return sum_.data();
    }
    std::transform(sum, sum + columns, added, sum_.begin(), std::plus<>());
    return sum_.data();
  }

  void store(std::int64_t row, std::int64_t column, const float* sum, std::int64_t columns) const {
    const RawMatrix& sums = args_.reduced.sums;
    std::byte* out = sums.row(row) + column * size_of(sums.dtype);
    if (sum == nullptr) {
      std::fill_n(out, columns * size_of(sums.dtype), std::byte{0});
    } else {
      row_ops::narrow(sums.dtype, sum, out, columns);
    }
  }

  const CombineArgs& args_;
  const std::vector<std::int32_t>& borders_;
  std::vector<GroupRows> groups_;
  SumTree tree_;
  std::array<float, SumTree::kColumns> sum_;
};

std::optional<std::string> reject(const CombineArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run(const CombineArgs& args) {
  const std::int64_t num_tokens = args.plan.num_tokens();
  const std::int64_t layout_rows = args.plan.expert_begin[args.plan.num_experts];
  require(layout_rows <= args.rows.rows, "the layout has {} rows, the experts' output {}",
          layout_rows, args.rows.rows);
  const std::vector<std::int32_t> borders = group_borders(args);
  const std::int64_t tasks = (num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(args.execution.pool, tasks, [&](std::int64_t task, int) {
    TokenCombiner combine_token(args, borders);
    const std::int64_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
    for (std::int64_t token = task * kTokensPerTask; token < end; ++token) combine_token(token);
  });
}

}  // namespace

const Implementation<CombineArgs> kCombineCpu{"cpu.tree", reject, run};

}  // namespace switchyard
