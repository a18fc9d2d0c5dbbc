// Home side of combine on a CPU: the parts of a token from all ranks by the tree, the shared
// experts, one rounding. Bound by reading the parts; tokens are split over the threads.
#include <algorithm>

#include "combine/cpu/sum_tree.hpp"
#include "combine/implementations.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"
#include "core/tree_width.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kTokensPerTask = 16;

void finish_token(const FinishArgs& args, std::int64_t token, SumTree& tree) {
  const ConstRawMatrix& partials = args.partials;
  const bool mapped = args.partial_row.data != nullptr;
  const auto num_ranks = static_cast<std::int32_t>(mapped ? args.partial_row.shape[1] : 1);
  const std::int32_t groups = args.groups_per_row;
  const std::int64_t hidden = args.out.cols;
  for (std::int64_t column = 0; column < hidden; column += SumTree::kColumns) {
    const std::int64_t columns = std::min(SumTree::kColumns, hidden - column);
    tree.begin(columns);
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
      const std::int64_t part = mapped ? args.partial_row.row(token)[rank] : token;
      if (part < 0) continue;
      require((part + 1) * groups <= partials.rows, "partial_row[{}, {}]={} exceeds {} parts",
              token, rank, part, partials.rows / groups);
      for (std::int32_t g = 0; g < groups; ++g) {
        row_ops::widen(partials.dtype,
                       partials.row(part * groups + g) + column * size_of(partials.dtype),
                       tree.add_leaf(rank * groups + g), columns);
      }
    }
    float* sum = tree.root(tree_width(num_ranks * groups));
    if (sum == nullptr) {
      sum = tree.add_leaf(0);
      std::fill_n(sum, columns, 0.0F);
    }
    if (args.shared.data != nullptr) row_ops::add(args.shared.row(token) + column, sum, columns);
    row_ops::narrow(args.out.dtype, sum, args.out.row(token) + column * size_of(args.out.dtype),
                    columns);
  }
}

std::optional<std::string> reject(const FinishArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run(const FinishArgs& args) {
  const std::int64_t num_tokens = args.out.rows;
  const std::int64_t tasks = (num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(args.execution.pool, tasks, [&](std::int64_t task, int) {
    SumTree tree;
    const std::int64_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
    for (std::int64_t token = task * kTokensPerTask; token < end; ++token) {
      finish_token(args, token, tree);
    }
  });
}

}  // namespace

const Implementation<FinishArgs> kFinishCpu{"cpu.tree", reject, run};

}  // namespace switchyard
