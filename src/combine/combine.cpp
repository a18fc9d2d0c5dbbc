// Contract checks of combine and finish, who runs them, and the share of the tree a rank has.
#include "switchyard/combine.hpp"

#include "combine/implementations.hpp"
#include "core/reduced_check.hpp"

namespace switchyard {
namespace {

constexpr const Implementation<CombineArgs>* kCombines[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kCombineCudaBulk, &kCombineCudaBulkMany, &kCombineCudaTree, &kCombineCudaAny,
#endif
    &kCombineCpu};
constexpr const Implementation<FinishArgs>* kFinishes[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kFinishCuda,
#endif
    &kFinishCpu};

std::string sizes_of(const CombineArgs& args) {
  return fmt::format("{} tokens x {}, up to {} rows of {}, {} groups, sums {}",
                     args.plan.num_tokens(), args.rows.cols, args.plan.token_row.shape[0],
                     to_string(args.rows.dtype), args.reduced.subtree.num_groups,
                     to_string(args.reduced.sums.dtype));
}

std::string sizes_of(const FinishArgs& args) {
  return fmt::format(
      "{} tokens x {}, {} partial sums each of {}, to {}", args.out.rows, args.out.cols,
      args.groups_per_row * (args.partial_row.data != nullptr ? args.partial_row.shape[1] : 1),
      to_string(args.partials.dtype), to_string(args.out.dtype));
}

}  // namespace

Subtree subtree_of_rank(ReductionOrder order, std::int32_t rank, std::int32_t num_ranks) {
  require(num_ranks >= 1 && rank >= 0 && rank < num_ranks, "rank {} is not in 0 to {}", rank,
          num_ranks - 1);
  require(order.groups >= 1, "groups={} is not positive", order.groups);
  if (order.groups % num_ranks != 0) {
    order.groups = num_ranks;
    return {.order = order, .first_group = rank, .num_groups = 1};
  }
  const std::int32_t share = order.groups / num_ranks;
  return {.order = order, .first_group = rank * share, .num_groups = share};
}

void combine(const CombineArgs& args) {
  const PlanView& plan = args.plan;
  require_float("rows", args.rows.dtype);
  require_reduced(args.reduced, plan.num_tokens(), args.rows.cols, args.first_expert,
                  plan.num_experts);
  require_shape("expert_begin", plan.expert_begin, std::int64_t{plan.num_experts} + 1);
  require_shape("token_begin", plan.token_begin, plan.num_tokens() + 1);
  if (args.added.data != nullptr) {
    require_shape("added", args.added, plan.num_tokens(), args.rows.cols);
    require(!args.reduced.each_group, "something is added to the sums of each group by itself");
  }
  select<CombineArgs>("combine", kCombines, args, sizes_of).run(args);
}

void finish(const FinishArgs& args) {
  require_float("partials", args.partials.dtype);
  require_float("out", args.out.dtype);
  require(args.groups_per_row >= 1, "groups_per_row={} is not positive", args.groups_per_row);
  const std::int64_t num_tokens = args.out.rows;
  const std::int64_t hidden = args.out.cols;
  const bool mapped = args.partial_row.data != nullptr;
  const std::int64_t num_ranks = mapped ? args.partial_row.shape[1] : 1;
  require(num_ranks >= 1 && num_ranks * args.groups_per_row <= kMaxLeaves,
          "{} ranks with groups_per_row={} exceed {} parts a token", num_ranks, args.groups_per_row,
          kMaxLeaves);
  if (mapped) {
    require_shape("partial_row", args.partial_row, num_tokens, num_ranks);
    require_shape("partials", args.partials, args.partials.rows, hidden);
  } else {
    require_shape("partials", args.partials, num_tokens * args.groups_per_row, hidden);
  }
  if (args.shared.data != nullptr) require_shape("shared", args.shared, num_tokens, hidden);
  require_shape("out", args.out, num_tokens, hidden);
  select<FinishArgs>("finish", kFinishes, args, sizes_of).run(args);
}

}  // namespace switchyard
