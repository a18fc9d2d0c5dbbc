// Plan and capacity of a list of assignments on a GPU. Each assignment passes for a token with one
// expert: the kernels of a dense routing then sort them in the very order that the list's own has.
// For a plan one more kernel says again what is said of tokens; a token's rows are put in order by
// counting, in steps of the square of their number. Bound by launches.
#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"
#include "core/shape_check.hpp"
#include "plan/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;

struct ListParams {
  const std::int32_t* list_begin;   // [N+1]
  const std::int32_t* given_begin;  // [A+1] the plan's token_begin, each assignment a token
  const std::int32_t* given_row;    // [A] and its token_row
  std::int32_t* token_begin;        // [N+1]
  std::int32_t* token_row;          // [A] given_row at first
  std::int32_t* row_token;          // [rows] assignments, to become tokens
  DeviceStatus* status;             // or null
  std::int32_t num_tokens, size;
};

/// The last token that begins at or before assignment i, if token_begin ascends.
__device__ __forceinline__ int token_of(const ListParams& p, int i) {
  int low = 0;
  for (int high = p.num_tokens; low < high;) {
    const int middle = low + (high - low) / 2;
    if (p.list_begin[middle + 1] <= i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return min(low, p.num_tokens - 1);
}

__device__ __forceinline__ void place_assignment(const ListParams& p, int i) {
  const int token = token_of(p, i);
  const int begin = max(p.list_begin[token], 0);
  const int end = min(p.list_begin[token + 1], p.size);
  const bool found = begin <= i && i < end;
  if (!found && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
  const int place = p.given_begin[i];
  if (p.given_begin[i + 1] == place) return;  // dropped, unused or another rank's
  const int row = p.given_row[place];
  p.row_token[row] = token;
  if (!found) return;
  const int first = p.given_begin[begin];
  const int last = p.given_begin[end];
  int before = 0;
  for (int other = first; other < last; ++other) before += p.given_row[other] < row ? 1 : 0;
  p.token_row[first + before] = row;
}

__global__ void __launch_bounds__(kThreads) tokens_of_list(const ListParams p) {
  const int step = static_cast<int>(gridDim.x) * kThreads;
  const int thread = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  ptx::start_after_previous_kernel();
  for (int t = thread; t <= p.num_tokens; t += step) {
    const int begin = p.list_begin[t];
    const bool broken = begin < (t == 0 ? 0 : p.list_begin[t - 1]) || (t == 0 && begin != 0) ||
                        (t == p.num_tokens && begin != p.size);
    if (broken && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
    p.token_begin[t] = p.given_begin[max(0, min(begin, p.size))];
  }
  for (int i = thread; i < p.size; i += step) place_assignment(p, i);
}

/// A token with one expert for each assignment.
DenseAssignments one_each(const AssignmentList& list) {
  const std::int64_t size = num_assignments(list);
  return {.expert = {list.expert.data, {size, 1}}, .weight = {list.weight.data, {size, 1}}};
}

constexpr std::int64_t align(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

template <typename Args>
Args as_one_each(Args args) {
  args.assignments = one_each(std::get<AssignmentList>(args.assignments));
  return args;
}

template <typename Args>
bool takes_list(const Args& args) {
  return std::holds_alternative<AssignmentList>(args.assignments);
}

std::optional<std::string> reject_plan(const PlanArgs& args) {
  if (!takes_list(args)) return "takes a list of assignments, not a dense routing";
  return kPlanCudaCounting.reject(as_one_each(args));
}

void run_plan(const PlanArgs& args) {
  const auto& list = std::get<AssignmentList>(args.assignments);
  const std::int64_t size = num_assignments(list);
  const PlanView& plan = args.plan;
  const Execution& execution = args.execution;
  require(plan.most_rows == 0,
          "a list's tokens may have any number of rows, but the plan says {} at most (most_rows)",
          plan.most_rows);
  require(size <= plan.token_row.shape[0], "the tokens may need {} rows, token_row has room for {}",
          size, plan.token_row.shape[0]);
  const std::int64_t bytes = plan_list_workspace_bytes(size, plan.num_experts);
  require(execution.workspace != nullptr && bytes <= execution.workspace_bytes,
          "plan needs {} bytes of workspace, has {}", bytes, execution.workspace_bytes);
  const std::int64_t own = align(plan_workspace_bytes(size, 1, plan.num_experts));
  auto* const given =
      reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(execution.workspace) + own);
  PlanArgs one_each = as_one_each(args);
  one_each.plan.token_begin = {given, {size + 1}};
  one_each.plan.token_row = {given + size + 1, {size}};
  one_each.plan.most_rows = 1;
  kPlanCudaCounting.run(one_each);
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  // So that whatever a broken token_begin leaves out is a row all the same.
  SWITCHYARD_CUDA(cudaMemcpyAsync(plan.token_row.data, one_each.plan.token_row.data,
                                  static_cast<std::size_t>(4 * size), cudaMemcpyDeviceToDevice,
                                  stream));
  const ListParams params{.list_begin = list.token_begin.data,
                          .given_begin = one_each.plan.token_begin.data,
                          .given_row = one_each.plan.token_row.data,
                          .token_begin = plan.token_begin.data,
                          .token_row = plan.token_row.data,
                          .row_token = plan.row_token.data,
                          .status = execution.status,
                          .num_tokens = static_cast<std::int32_t>(num_tokens(list)),
                          .size = static_cast<std::int32_t>(size)};
  const std::int64_t items = std::max(size, num_tokens(list) + 1);
  const auto blocks = static_cast<unsigned>((items + kThreads - 1) / kThreads);
  launch_overlapped(tokens_of_list, blocks, kThreads, 0, stream, params);
}

std::optional<std::string> reject_capacity(const CapacityArgs& args) {
  if (!takes_list(args)) return "takes a list of assignments, not a dense routing";
  const bool by_choice = args.policy == DropPolicy::kChoice || args.policy == DropPolicy::kBpr;
  if (by_choice && args.capacity > 0) {
    return "drops by the order of choices of a dense routing only";
  }
  return kCapacityCuda.reject(as_one_each(args));
}

void run_capacity(const CapacityArgs& args) {
  CapacityArgs one_each = as_one_each(args);
  one_each.policy = args.policy == DropPolicy::kProbs ? args.policy : DropPolicy::kToken;
  one_each.top_score = {};
  kCapacityCuda.run(one_each);
}

}  // namespace

const Implementation<PlanArgs> kPlanCudaList{"cuda.list", reject_plan, run_plan};
const Implementation<CapacityArgs> kCapacityCudaList{"cuda.list", reject_capacity, run_capacity};

std::int64_t plan_list_workspace_bytes(std::int64_t max_assignments, std::int64_t num_experts) {
  return align(plan_workspace_bytes(max_assignments, 1, num_experts)) +
         4 * (2 * max_assignments + 1);
}

}  // namespace switchyard
