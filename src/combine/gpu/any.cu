// Combine of tokens with any number of rows, of any type: what lists of assignments need. A thread
// a column walks over the token's rows in memory; nothing is known of how many they are, and
// nothing is asked for ahead. Slow beside the others, which know.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "combine/gpu/call.hpp"
#include "combine/gpu/tree.cuh"
#include "combine/implementations.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/tree_width.hpp"

namespace switchyard {
namespace {

using namespace combining;

constexpr int kThreads = 128;
constexpr int kLevels = 6;
static_assert(1 << kLevels == kMaxGroups);

struct AnyParams {
  const void* rows;                  // [rows, H]
  void* sums;                        // [N, H], or [N * num_groups, H]
  const float* added;                // [N, H] or null
  const std::int32_t* expert_begin;  // [El+1]
  const float* row_weight;           // [rows]
  const std::int32_t* token_begin;   // [N+1]
  const std::int32_t* token_row;     // [N*K, or A]
  std::int64_t hidden;
  DType in, out;
  std::int32_t num_groups, width;
  bool each_group;
  std::int32_t border[kMaxGroups];  // local expert at which group g + 1 begins
};

__device__ __forceinline__ float load(const AnyParams& p, std::int64_t at) {
  switch (p.in) {
    case DType::kBF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(p.rows)[at]);
    case DType::kF16: return __half2float(static_cast<const __half*>(p.rows)[at]);
    default: return static_cast<const float*>(p.rows)[at];
  }
}

__device__ __forceinline__ void store(const AnyParams& p, std::int64_t row, int column, float sum) {
  const std::int64_t at = row * p.hidden + column;
  switch (p.out) {
    case DType::kBF16: static_cast<__nv_bfloat16*>(p.sums)[at] = __float2bfloat16_rn(sum); break;
    case DType::kF16: static_cast<__half*>(p.sums)[at] = __float2half_rn(sum); break;
    default: static_cast<float*>(p.sums)[at] = sum; break;
  }
}

__global__ void __launch_bounds__(kThreads)
    combine_any_kernel(const __grid_constant__ AnyParams p) {
  const std::int64_t token = blockIdx.x;
  const int column = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  if (column >= p.hidden) return;
  const std::int64_t first_row = p.each_group ? token * p.num_groups : token;
  RegisterTree<kLevels, 1> tree;
  float& sum = tree.sum[0];
  int open = -1;  // the group of the last row
  int group = 0;
  const auto leave_to = [&](int next) {  // each_group: its sum, and +0 in those between
    if (open >= 0) store(p, first_row + open, column, sum);
    for (int g = open + 1; g < next; ++g) store(p, first_row + g, column, 0.0F);
    sum = 0.0F;
  };
  const int end = p.token_begin[token + 1];
  for (int i = p.token_begin[token]; i < end; ++i) {
    const int row = p.token_row[i];  // they ascend
    while (group < p.num_groups - 1 && row >= p.expert_begin[p.border[group]]) ++group;
    if (group != open) {
      if (p.each_group) {
        leave_to(group);
      } else if (open < 0) {
        tree.begin(group);
      } else {
        tree.next_leaf(group);
      }
      open = group;
    }
    sum = __fmaf_rn(p.row_weight[row], load(p, row * p.hidden + column), sum);
  }
  if (p.each_group) {
    leave_to(p.num_groups);
    return;
  }
  if (open >= 0) tree.finish(p.width);
  if (p.added != nullptr) sum = __fadd_rn(sum, p.added[token * p.hidden + column]);
  store(p, first_row, column, sum);
}

void run(const CombineArgs& args) {
  const std::int64_t num_tokens = args.plan.num_tokens();
  const std::int64_t hidden = args.rows.cols;
  if (num_tokens == 0 || hidden == 0) return;
  AnyParams params{};
  set_call(params, args);
  params.added = args.added.data;
  params.hidden = hidden;
  params.in = args.rows.dtype;
  params.out = args.reduced.sums.dtype;
  params.width = tree_width(params.num_groups);
  params.each_group = args.reduced.each_group;
  find_borders(args, params.border);
  const dim3 grid(static_cast<unsigned>(num_tokens),
                  static_cast<unsigned>((hidden + kThreads - 1) / kThreads));
  combine_any_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(
      params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<CombineArgs> kCombineCudaAny{"cuda.any", reject_on_gpu, run};

}  // namespace switchyard
