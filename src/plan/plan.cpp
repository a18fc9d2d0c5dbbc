// Contract checks of capacity and plan, and which implementation runs them.
#include "switchyard/plan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/shape_check.hpp"
#include "plan/implementations.hpp"
#include "switchyard/names.hpp"

namespace switchyard {
namespace {

constexpr const Implementation<CapacityArgs>* kCapacities[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kCapacityCuda, &kCapacityCudaList,
#endif
    &kCapacityCpu};
constexpr const Implementation<PlanArgs>* kPlans[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kPlanCudaFew, &kPlanCudaTiles, &kPlanCudaCounting, &kPlanCudaList,
#endif
    &kPlanCpu};
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

void check(const Layout& layout) {
  require(layout.kind != LayoutKind::kAligned || layout.alignment >= 1,
          "alignment of the layout is {}, want at least 1", layout.alignment);
}

void check(const DenseAssignments& dense) {
  const auto [num_tokens, top_k] = dense.expert.shape;
  require(num_tokens * top_k <= kMaxRows, "{} tokens with top_k={} exceed {} assignments",
          num_tokens, top_k, kMaxRows);
  require_shape("expert", dense.expert, num_tokens, top_k);
  require_shape("weight", dense.weight, num_tokens, top_k);
}

void check(const AssignmentList& list) {
  const std::int64_t size = num_assignments(list);
  require(size <= kMaxRows, "{} assignments, at most {} are possible", size, kMaxRows);
  require(list.token_begin.data != nullptr && num_tokens(list) >= 0,
          "token_begin of the assignments is empty, want one more than tokens");
  require(num_tokens(list) > 0 || size == 0, "{} assignments of no token", size);
  require_shape("expert", list.expert, size);
  require_shape("weight", list.weight, size);
}

void check(const AnyAssignments& assignments) {
  std::visit([](const auto& shape) { check(shape); }, assignments);
}

std::string words_of(const Layout& layout) {
  const char* const kind = to_string(layout.kind);
  return layout.kind == LayoutKind::kAligned ? fmt::format("{}:{}", kind, layout.alignment) : kind;
}

std::string words_of(const DenseAssignments& dense) {
  return fmt::format("{} tokens x {}", dense.expert.shape[0], dense.expert.shape[1]);
}

std::string words_of(const AssignmentList& list) {
  return fmt::format("{} assignments of {} tokens", num_assignments(list), num_tokens(list));
}

std::string words_of(const AnyAssignments& assignments) {
  return std::visit([](const auto& shape) { return words_of(shape); }, assignments);
}

std::string sizes_of(const CapacityArgs& args) {
  return fmt::format("{}, {} experts of {} slots", words_of(args.assignments), args.num_experts,
                     args.capacity);
}

std::string sizes_of(const PlanArgs& args) {
  return fmt::format("{}, {} experts, {}", words_of(args.assignments), args.plan.num_experts,
                     words_of(args.layout));
}

}  // namespace

std::int64_t capacity_of(double factor, std::int64_t num_tokens, std::int64_t top_k,
                         std::int64_t num_experts) {
  require(std::isfinite(factor) && factor > 0, "capacity_factor={} is not finite and positive",
          factor);
  require(num_tokens >= 0 && top_k >= 1 && num_experts >= 1,
          "capacity of {} tokens with top_k={} and num_experts={}", num_tokens, top_k, num_experts);
  const double slots = std::ceil(
      factor * static_cast<double>(num_tokens * top_k) / static_cast<double>(num_experts) - 1e-9);
  require(slots <= static_cast<double>(kMaxRows), "capacity_factor={} gives {} slots an expert",
          factor, slots);
  // 0 would mean no limit.
  return num_tokens == 0 ? 0 : std::max<std::int64_t>(1, static_cast<std::int64_t>(slots));
}

void apply_capacity(const CapacityArgs& args) {
  require(args.num_experts >= 1, "num_experts={} is not positive", args.num_experts);
  require(args.capacity >= 0, "capacity={} is negative", args.capacity);
  require(args.zero_computation >= 0 && args.zero_computation <= args.num_experts,
          "zero_computation={} experts of num_experts={}", args.zero_computation, args.num_experts);
  require(args.zero_computation_capacity >= 0, "zero_computation_capacity={} is negative",
          args.zero_computation_capacity);
  require(
      args.policy != DropPolicy::kReroute,
      "policy=reroute: the router reroutes, by RouteArgs::room or in a layer; want token behind "
      "it");
  check(args.assignments);
  require_shape("kept", args.kept, num_assignments(args.assignments));
  require_shape("counts", args.counts, args.num_experts);
  require_shape("counts_kept", args.counts_kept, args.num_experts);
  if (args.top_score.data != nullptr) {
    require_shape("top_score", args.top_score, num_tokens(args.assignments));
  }
  select<CapacityArgs>("capacity", kCapacities, args, sizes_of).run(args);
}

std::int64_t max_rows(const Layout& layout, std::int64_t num_tokens, std::int64_t top_k,
                      std::int32_t num_experts, std::int64_t padded_rows) {
  check(layout);
  const std::int64_t used = num_tokens * top_k;
  switch (layout.kind) {
    case LayoutKind::kCompact: return used;
    case LayoutKind::kAligned:
      return used + std::min<std::int64_t>(num_experts, used) * (layout.alignment - 1);
    case LayoutKind::kPadded: return num_experts * padded_rows;
  }
  return used;
}

std::int64_t max_rows(const Layout& layout, const AnyAssignments& assignments,
                      std::int32_t num_experts, std::int64_t padded_rows) {
  return max_rows(layout, num_assignments(assignments), 1, num_experts, padded_rows);
}

void plan(const PlanArgs& args) {
  const PlanView& view = args.plan;
  check(args.layout);
  require(view.num_experts >= 0, "num_experts={} of the plan is negative", view.num_experts);
  require(args.padded_rows >= 0, "padded_rows={} is negative", args.padded_rows);
  check(args.assignments);
  const std::int64_t size = num_assignments(args.assignments);
  const std::int64_t rows =
      max_rows(args.layout, args.assignments, view.num_experts, args.padded_rows);
  require(rows <= kMaxRows, "{} assignments need {} rows, at most {} are possible", size, rows,
          kMaxRows);
  if (args.kept.data != nullptr) require_shape("kept", args.kept, size);
  require_shape("expert_begin", view.expert_begin, std::int64_t{view.num_experts} + 1);
  require_shape("expert_rows", view.expert_rows, view.num_experts);
  require_shape("token_begin", view.token_begin, num_tokens(args.assignments) + 1);
  require_shape("row_weight", view.row_weight, view.row_token.shape[0]);
  select<PlanArgs>("plan", kPlans, args, sizes_of).run(args);
}

}  // namespace switchyard
