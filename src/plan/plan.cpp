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
    &kCapacityCuda,
#endif
    &kCapacityCpu};
constexpr const Implementation<PlanArgs>* kPlans[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kPlanCudaFew, &kPlanCudaTiles, &kPlanCudaCounting,
#endif
    &kPlanCpu};
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

void check(const Layout& layout) {
  require(layout.kind != LayoutKind::kAligned || layout.alignment >= 1,
          "alignment of the layout is {}, want at least 1", layout.alignment);
}

std::string words_of(const Layout& layout) {
  const char* const kind = to_string(layout.kind);
  return layout.kind == LayoutKind::kAligned ? fmt::format("{}:{}", kind, layout.alignment) : kind;
}

std::string sizes_of(const CapacityArgs& args) {
  return fmt::format("{} tokens x {}, {} experts of {} slots", args.expert.shape[0],
                     args.expert.shape[1], args.num_experts, args.capacity);
}

std::string sizes_of(const PlanArgs& args) {
  return fmt::format("{} tokens x {}, {} experts, {}", args.expert.shape[0], args.expert.shape[1],
                     args.plan.num_experts, words_of(args.layout));
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
  const std::int64_t num_tokens = args.expert.shape[0];
  const std::int64_t top_k = args.expert.shape[1];
  require(args.num_experts >= 1, "num_experts={} is not positive", args.num_experts);
  require(args.capacity >= 0, "capacity={} is negative", args.capacity);
  require(num_tokens * top_k <= kMaxRows, "{} tokens with top_k={} exceed {} assignments",
          num_tokens, top_k, kMaxRows);
  require_shape("expert", args.expert, num_tokens, top_k);
  require_shape("weight", args.weight, num_tokens, top_k);
  require_shape("kept", args.kept, num_tokens, top_k);
  require_shape("counts", args.counts, args.num_experts);
  require_shape("counts_kept", args.counts_kept, args.num_experts);
  if (args.top_score.data != nullptr) require_shape("top_score", args.top_score, num_tokens);
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

void plan(const PlanArgs& args) {
  const std::int64_t num_tokens = args.expert.shape[0];
  const std::int64_t top_k = args.expert.shape[1];
  const PlanView& view = args.plan;
  check(args.layout);
  require(view.num_experts >= 0, "num_experts={} of the plan is negative", view.num_experts);
  require(args.padded_rows >= 0, "padded_rows={} is negative", args.padded_rows);
  const std::int64_t rows =
      max_rows(args.layout, num_tokens, top_k, view.num_experts, args.padded_rows);
  require(num_tokens * top_k <= kMaxRows && rows <= kMaxRows,
          "{} tokens with top_k={} need {} rows, at most {} are possible", num_tokens, top_k, rows,
          kMaxRows);
  require_shape("expert", args.expert, num_tokens, top_k);
  require_shape("weight", args.weight, num_tokens, top_k);
  if (args.kept.data != nullptr) require_shape("kept", args.kept, num_tokens, top_k);
  require_shape("expert_begin", view.expert_begin, std::int64_t{view.num_experts} + 1);
  require_shape("expert_rows", view.expert_rows, view.num_experts);
  require_shape("token_begin", view.token_begin, num_tokens + 1);
  require_shape("row_weight", view.row_weight, view.row_token.shape[0]);
  select<PlanArgs>("plan", kPlans, args, sizes_of).run(args);
}

}  // namespace switchyard
