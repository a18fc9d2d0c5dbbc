// Plan on a CPU: a stable counting sort of the kept assignments by expert. Bound by memory for many
// tokens, by latency for few; chunks of tokens go over the threads, and since a chunk's places
// follow from counts alone, the result does not depend on them.
#include <algorithm>
#include <atomic>
#include <vector>

#include "core/check.hpp"
#include "plan/cpu/counting.hpp"
#include "plan/implementations.hpp"

namespace switchyard {
namespace {

/// The local expert of assignment i, or -1 if it is dropped, unused or another rank's.
std::int32_t local_expert(const PlanArgs& args, std::int64_t i) {
  if (args.kept.data != nullptr && args.kept.data[i] == 0) return -1;
  const std::int64_t local = std::int64_t{args.expert.data[i]} - args.first_expert;
  return local >= 0 && local < args.plan.num_experts ? static_cast<std::int32_t>(local) : -1;
}

bool ids_in_range(const PlanArgs& args, std::int64_t begin, std::int64_t end) {
  if (args.total_experts == 0) return true;
  return std::all_of(args.expert.data + begin, args.expert.data + end,
                     [&](std::int32_t e) { return e >= -1 && e < args.total_experts; });
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
void place_tokens(const PlanArgs& args) {
  const PlanView& plan = args.plan;
  const std::int64_t num_tokens = args.expert.shape[0];
  const std::int64_t top_k = args.expert.shape[1];
  std::int32_t rows = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    plan.token_begin[t] = rows;
    for (std::int64_t k = 0; k < top_k; ++k) rows += local_expert(args, t * top_k + k) >= 0 ? 1 : 0;
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
  const std::int64_t top_k = args.expert.shape[1];
  ChunkedCounts counts(args.execution.pool, args.expert.shape[0], plan.num_experts);
  std::atomic<bool> bad_id{false};
  counts.for_each_chunk([&](std::int64_t first, std::int64_t last, std::int32_t* count) {
    if (!ids_in_range(args, first * top_k, last * top_k)) bad_id = true;
    for (std::int64_t i = first * top_k; i < last * top_k; ++i) {
      const std::int32_t e = local_expert(args, i);
      if (e >= 0) ++count[e];
    }
  });
  if (bad_id) fail_with_first_bad_id(args.expert, args.total_experts);
  counts.scan(plan.expert_rows.data);
  place_experts(args);
  place_tokens(args);
  fill_padding(args);
  counts.for_each_chunk([&](std::int64_t first, std::int64_t last, std::int32_t* next) {
    for (std::int64_t t = first; t < last; ++t) {
      std::int32_t* const rows = plan.token_row.data + plan.token_begin[t];
      std::int32_t count = 0;
      for (std::int64_t i = t * top_k; i < (t + 1) * top_k; ++i) {
        const std::int32_t e = local_expert(args, i);
        if (e < 0) continue;
        const std::int32_t row = plan.expert_begin[e] + next[e]++;
        plan.row_token[row] = static_cast<std::int32_t>(t);
        plan.row_weight[row] = args.weight.data[i];
        rows[count++] = row;
      }
      std::sort(rows, rows + count);
    }
  });
}

}  // namespace

const Implementation<PlanArgs> kPlanCpu{"cpu.counting", reject, run};

}  // namespace switchyard
