// Plan of a few assignments, as a decode step has them: one block, one barrier. Bound by latency: a
// launch and two trips to memory. Every thread compares its assignment, or its expert, with all
// assignments, which is less than the steps of a sort.
#include <algorithm>

#include "core/cuda_device.hpp"
#include "core/ptx.cuh"
#include "plan/plan_few.hpp"
#include "plan/plan_kernel.cuh"

namespace switchyard::planning {
namespace {

constexpr int kNoExpert = 0x7fffffff;  // sorts behind all others

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
    const int mine = experts[thread];
    const int token = thread / p.top_k;
    const int begin = token * p.top_k;
    int row = 0;     // assignments before this one
    int place = 0;   // of the row among the token's
    int listed = 0;  // rows of earlier tokens
    int all = 0;
    for (int i = 0; i < count; ++i) {
      const int its = experts[i];
      const bool before = its < mine || (its == mine && i < thread);
      const bool valid = its != kNoExpert;
      row += before ? 1 : 0;
      place += before && i >= begin && i < begin + p.top_k ? 1 : 0;
      listed += valid && i < begin ? 1 : 0;
      all += valid ? 1 : 0;
    }
    if (thread == begin) p.token_begin[token] = listed;
    if (thread == 0) p.token_begin[p.num_tokens] = all;
    if (item.expert < 0) return;
    p.row_token[row] = token;
    p.row_weight[row] = item.weight;
    p.token_row[listed + place] = row;
    return;
  }
  const int step = static_cast<int>(blockDim.x) - kMostFew;
  for (int e = thread - kMostFew; e <= p.num_experts; e += step) {
    int before = 0;
    int rows = 0;
    for (int i = 0; i < count; ++i) {
      before += experts[i] < e ? 1 : 0;
      rows += experts[i] == e ? 1 : 0;
    }
    p.expert_begin[e] = before;
    if (e < p.num_experts) p.expert_rows[e] = rows;
  }
}

}  // namespace

void launch_plan_few(const PlanParams& params, cudaStream_t stream) {
  const int threads = std::min(1024, kMostFew + (params.num_experts + 1 + 31) / 32 * 32);
  launch_overlapped(plan_few_kernel, 1, threads, 0, stream, params);
}

}  // namespace switchyard::planning
