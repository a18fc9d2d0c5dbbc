// Plan on a CPU: a stable counting sort of the kept assignments by expert. Bound by memory for many
// tokens, by latency for few; chunks of tokens go over the threads, and since a chunk's places
// follow from counts alone, the result does not depend on them.
#include <algorithm>
#include <atomic>
#include <vector>

#include "core/check.hpp"
#include "plan/cpu/by_token.hpp"
#include "plan/cpu/counting.hpp"
#include "plan/implementations.hpp"

namespace switchyard {
namespace {

/// The local expert of assignment i, or -1 if it is dropped, unused or another rank's.
std::int32_t local_expert(const PlanArgs& args, const ByToken& assignments, std::int64_t i) {
  if (args.kept.data != nullptr && args.kept[i] == 0) return -1;
  const std::int64_t local = std::int64_t{assignments.expert(i)} - args.first_expert;
  return local >= 0 && local < args.plan.num_experts ? static_cast<std::int32_t>(local) : -1;
}

bool ids_in_range(const ByToken& assignments, std::int64_t begin, std::int64_t end,
                  std::int32_t total_experts) {
  if (total_experts == 0) return true;
  for (std::int64_t i = begin; i < end; ++i) {
    if (assignments.expert(i) < -1 || assignments.expert(i) >= total_experts) return false;
  }
  return true;
}

/// Fills expert_begin from expert_rows.
void place_experts(const PlanArgs& args) {
  const PlanView& plan = args.plan;
  std::int64_t next = 0;
  for (std::int32_t e = 0; e < plan.num_experts; ++e) {
    const std::int64_t rows = plan.expert_rows[e];
    plan.expert_begin[e] = static_cast<std::int32_t>(next);
    switch (args.layout.kind) {
      case LayoutKind::kCompact: next += rows; break;
      case LayoutKind::kAligned: {
        const std::int64_t alignment = args.layout.alignment;
        next += (rows + alignment - 1) / alignment * alignment;
        break;
      }
      case LayoutKind::kPadded:
        require(rows <= args.padded_rows, "expert {} has {} rows, more than padded_rows={}",
                args.first_expert + e, rows, args.padded_rows);
        next += args.padded_rows;
        break;
    }
  }
  plan.expert_begin[plan.num_experts] = static_cast<std::int32_t>(next);
  require(next <= plan.row_token.shape[0] && (next == 0 || plan.row_token.data != nullptr),
          "the layout has {} rows, row_token has room for {}", next, plan.row_token.shape[0]);
}

/// Fills token_begin.
void place_tokens(const PlanArgs& args, const ByToken& assignments) {
  const PlanView& plan = args.plan;
  const std::int64_t num_tokens = assignments.num_tokens();
  std::int32_t rows = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    plan.token_begin[t] = rows;
    const std::int64_t end = assignments.begin(t + 1);
    for (std::int64_t i = assignments.begin(t); i < end; ++i) {
      rows += local_expert(args, assignments, i) >= 0 ? 1 : 0;
    }
  }
  plan.token_begin[num_tokens] = rows;
  require(rows <= plan.token_row.shape[0] && (rows == 0 || plan.token_row.data != nullptr),
          "the tokens have {} rows, token_row has room for {}", rows, plan.token_row.shape[0]);
}

void fill_padding(const PlanArgs& args) {
  if (args.layout.kind == LayoutKind::kCompact) return;
  const PlanView& plan = args.plan;
  parallel_for(args.execution.pool, plan.num_experts, [&](std::int64_t e, int) {
    const std::int64_t begin = plan.expert_begin[e] + std::int64_t{plan.expert_rows[e]};
    const std::int64_t count = plan.expert_begin[e + 1] - begin;
    std::fill_n(plan.row_token.data + begin, count, -1);
    std::fill_n(plan.row_weight.data + begin, count, 0.0F);
  });
}

std::optional<std::string> reject(const PlanArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run(const PlanArgs& args) {
  const PlanView& plan = args.plan;
  const ByToken assignments(args.assignments);
  ChunkedCounts counts(args.execution.pool, assignments.num_tokens(), plan.num_experts);
  std::atomic<bool> bad_id{false};
  counts.for_each_chunk([&](std::int64_t first, std::int64_t last, std::int32_t* count) {
    const std::int64_t begin = assignments.begin(first);
    const std::int64_t end = assignments.begin(last);
    if (!ids_in_range(assignments, begin, end, args.total_experts)) bad_id = true;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int32_t e = local_expert(args, assignments, i);
      if (e >= 0) ++count[e];
    }
  });
  if (bad_id) assignments.fail_with_first_bad_id(args.total_experts);
  counts.scan(plan.expert_rows.data);
  place_experts(args);
  place_tokens(args, assignments);
  fill_padding(args);
  counts.for_each_chunk([&](std::int64_t first, std::int64_t last, std::int32_t* next) {
    for (std::int64_t t = first; t < last; ++t) {
      std::int32_t* const rows = plan.token_row.data + plan.token_begin[t];
      std::int32_t count = 0;
      const std::int64_t end = assignments.begin(t + 1);
      for (std::int64_t i = assignments.begin(t); i < end; ++i) {
        const std::int32_t e = local_expert(args, assignments, i);
        if (e < 0) continue;
        const std::int32_t row = plan.expert_begin[e] + next[e]++;
        plan.row_token[row] = static_cast<std::int32_t>(t);
        plan.row_weight[row] = assignments.weight(i);
        rows[count++] = row;
      }
      std::sort(rows, rows + count);
    }
  });
}

}  // namespace

const Implementation<PlanArgs> kPlanCpu{"cpu.counting", reject, run};

}  // namespace switchyard
