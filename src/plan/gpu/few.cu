// Plan of a few assignments, as a decode step has them: one block, one barrier. Bound by latency: a
// launch and two trips to memory. Every thread compares its assignment, or its expert, with all
// assignments, which is less than the steps of a sort.
#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"
#include "plan/gpu/call.hpp"
#include "plan/gpu/few.cuh"
#include "plan/gpu/few.hpp"
#include "plan/implementations.hpp"

namespace switchyard::planning {
namespace {

__global__ void __launch_bounds__(1024) plan_few_kernel(const PlanParams p) {
  __shared__ __align__(16) int experts[kMostFew];
  const int thread = static_cast<int>(threadIdx.x);
  const int count = p.num_tokens * p.top_k;
  ptx::start_after_previous_kernel();
  Item item{.index = thread, .expert = -1, .weight = 0.0F};
  if (thread < kMostFew) {
    item = load_item(p, thread, thread < count);
    count_bad_id(p, thread, thread < count);
    experts[thread] = item.expert < 0 ? kNoExpert : item.expert;
  }
  __syncthreads();
  if (thread < kMostFew) {
    if (thread >= count) return;
    store_few(p, thread, place_among(experts, thread, count, p.top_k), item);
    return;
  }
  const int step = static_cast<int>(blockDim.x) - kMostFew;
  for (int e = thread - kMostFew; e <= p.num_experts; e += step) {
    const FewRows rows = rows_among(experts, e, count);
    p.expert_begin[e] = rows.before;
    if (e < p.num_experts) p.expert_rows[e] = rows.count;
  }
}

std::optional<std::string> reject(const PlanArgs& args) {
  if (const auto reason = reject_on_gpu(args)) return reason;
  const auto& ids = std::get<DenseAssignments>(args.assignments).expert;
  if (!are_few(ids.shape[0], ids.shape[1], args.layout.kind == LayoutKind::kCompact)) {
    return "only for 1 to 64 assignments in the compact layout";
  }
  return std::nullopt;
}

void run(const PlanArgs& args) {
  const PlanParams params = prepare(args).params;
  const int threads = std::min(1024, kMostFew + (params.num_experts + 1 + 31) / 32 * 32);
  launch_overlapped(plan_few_kernel, 1, threads, 0,
                    static_cast<cudaStream_t>(args.execution.stream), params);
}

}  // namespace

PlanParams params_without_memory(const PlanArgs& args) {
  const PlanView& plan = args.plan;
  const auto& dense = std::get<DenseAssignments>(args.assignments);
  return {.expert = dense.expert.data,
          .weight = dense.weight.data,
          .kept = args.kept.data,
          .expert_begin = plan.expert_begin.data,
          .expert_rows = plan.expert_rows.data,
          .row_token = plan.row_token.data,
          .row_weight = plan.row_weight.data,
          .token_begin = plan.token_begin.data,
          .token_row = plan.token_row.data,
          .workspace = nullptr,
          .counts = nullptr,
          .status = args.execution.status,
          .num_tokens = static_cast<std::int32_t>(dense.expert.shape[0]),
          .top_k = static_cast<std::int32_t>(dense.expert.shape[1]),
          .num_experts = plan.num_experts,
          .first_expert = args.first_expert,
          .total_experts = args.total_experts,
          .tokens_per_block = 0,
          .layout = LayoutKind::kCompact,
          .alignment = 1,
          .capacity = 0xffffffffU};
}

}  // namespace switchyard::planning

namespace switchyard {

const Implementation<PlanArgs> kPlanCudaFew{"cuda.few", planning::reject, planning::run};

}  // namespace switchyard
