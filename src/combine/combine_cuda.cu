// Combine on a GPU: the weighted sum of each token's rows by the fixed order of sums. Bound by
// memory: K rows in, one out. A block takes a few tokens: it first learns all their rows, then its
// warps walk over pieces of tokens, 16 bytes a lane. Rows arrive in shared memory ahead of their
// use, in slots that only the lane which asked for them reads: no thread waits for another.
#include <algorithm>

#include "combine/implementations.hpp"
#include "combine/tree.cuh"
#include "core/cuda_device.hpp"
#include "core/pack16.cuh"
#include "core/ptx.cuh"

namespace switchyard {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 4;   // rows of a stage
constexpr int kStages = 4;  // of kBatch rows in flight: 64 KB a block
constexpr int kRingBytes = kStages * kBatch * kThreads * 16;
constexpr int kMaxGroups = 64;
constexpr int kMaxBlockTokens = 16;
constexpr int kMaxBlockRows = 512;

struct CombineParams {
  const void* rows;                  // [rows, H]
  void* sums;                        // [N, H], or [N * num_groups, H]
  const std::int32_t* expert_begin;  // [El+1]
  const float* row_weight;           // [rows]
  const std::int32_t* token_begin;   // [N+1]
  const std::int32_t* token_row;     // [N*K]
  std::int32_t num_tokens, hidden;
  std::int32_t tokens_per_block;
  std::int32_t pieces;            // of a token: one warp each at a time
  std::int32_t pieces_per_block;  // blocks along y share a token's
  std::int32_t num_groups, width;
  bool each_group;
  std::int32_t border[kMaxGroups];  // local expert at which group g + 1 begins
};

/// The rows of a block's tokens.
struct BlockRows {
  std::int32_t begin[kMaxBlockTokens + 1];  // into the lists below
  std::int32_t group_end[kMaxGroups];       // first row of the next group
  std::int32_t row[kMaxBlockRows];
  std::int32_t group[kMaxBlockRows];
  float weight[kMaxBlockRows];
};

/// Returns how many tokens the block has.
__device__ int load_block_rows(const CombineParams& p, int first_token, BlockRows& s) {
  const int thread = static_cast<int>(threadIdx.x);
  const int count = min(p.tokens_per_block, p.num_tokens - first_token);
  const int base = __ldg(p.token_begin + first_token);
  if (thread <= count) s.begin[thread] = __ldg(p.token_begin + first_token + thread) - base;
  if (thread < p.num_groups - 1) s.group_end[thread] = __ldg(p.expert_begin + p.border[thread]);
  __syncthreads();
  for (int i = thread; i < s.begin[count]; i += kThreads) {
    const int row = __ldg(p.token_row + base + i);
    s.row[i] = row;
    s.weight[i] = __ldg(p.row_weight + row);
    int group = 0;
    for (int g = 0; g < p.num_groups - 1; ++g) group += row >= s.group_end[g] ? 1 : 0;
    s.group[i] = group;
  }
  __syncthreads();
  return count;
}

/// A stage of a warp's work: kBatch rows of a piece of a token.
struct Cursor {
  int task;  // token * pieces + piece, within the block
  int token, column;
  int next, end;  // rows of the token, in the block's list

  __device__ __forceinline__ void open(const CombineParams& p, const BlockRows& s, int lane_columns,
                                       int first_piece, int pieces, int tasks) {
    if (task >= tasks) return;
    token = task / pieces;
    const int piece = first_piece + task - token * pieces;
    column = (piece * 32 + static_cast<int>(threadIdx.x) % 32) * lane_columns;
    next = s.begin[token];
    end = s.begin[token + 1];
  }
};

/// The sum of one piece of a token by the tree, written when complete.
template <typename Out, int kLevels, int kColumns>
class PieceSum {
 public:
  __device__ __forceinline__ PieceSum(const CombineParams& p) : p_(p) {}

  __device__ __forceinline__ void begin(std::int64_t token, int column) {
    token_ = token;
    column_ = column;
    group_ = -1;
    tree_ = {};
  }

  template <typename In>
  __device__ __forceinline__ void add(int group, float weight, const int4& bits) {
    if (group != group_) enter(group);
    float y[kColumns];
    unpack16(bits, y, In{});
#pragma unroll
    for (int c = 0; c < kColumns; ++c) tree_.sum[c] = __fmaf_rn(weight, y[c], tree_.sum[c]);
  }

  __device__ __forceinline__ void finish() {
    if (p_.each_group) {
      if (group_ >= 0) store(group_);
      clear_groups(group_ + 1, p_.num_groups);
      return;
    }
    if (group_ >= 0) tree_.finish(p_.width);
    store(0);
  }

 private:
  __device__ __forceinline__ void enter(int group) {
    if (p_.each_group) {
      if (group_ >= 0) store(group_);
      clear_groups(group_ + 1, group);
      tree_ = {};
    } else if (group_ < 0) {
      tree_.begin(group);
    } else {
      tree_.next_leaf(group);
    }
    group_ = group;
  }

  __device__ __forceinline__ Out* out(int group) const {
    const std::int64_t row = p_.each_group ? token_ * p_.num_groups + group : token_;
    return static_cast<Out*>(p_.sums) + row * p_.hidden + column_;
  }

  __device__ __forceinline__ void store(int group) const {
    if (column_ < p_.hidden) store_floats(out(group), tree_.sum);
  }

  __device__ __forceinline__ void clear_groups(int begin, int end) const {
    const float zero[kColumns] = {};
    for (int g = begin; g < end; ++g) {
      if (column_ < p_.hidden) store_floats(out(g), zero);
    }
  }

  const CombineParams& p_;
  std::int64_t token_ = 0;
  int column_ = 0;
  int group_ = -1;
  RegisterTree<kLevels, kColumns> tree_;
};

template <typename In, typename Out, int kLevels>
__global__ void __launch_bounds__(kThreads, 3)
    combine_kernel(const __grid_constant__ CombineParams p) {
  constexpr int kColumns = kPack<In>;
  __shared__ BlockRows s;
  extern __shared__ __align__(16) std::byte ring[];
  const int first_token = static_cast<int>(blockIdx.x) * p.tokens_per_block;
  const int first_piece = static_cast<int>(blockIdx.y) * p.pieces_per_block;
  const int pieces = min(p.pieces_per_block, p.pieces - first_piece);
  const int tasks = load_block_rows(p, first_token, s) * pieces;
  const std::uint32_t slots =
      ptx::shared_address(ring) + static_cast<std::uint32_t>(threadIdx.x) * 16;
  const In* const rows = static_cast<const In*>(p.rows);
  const auto slot = [&](int stage, int i) {
    return slots + static_cast<std::uint32_t>((stage * kBatch + i) * kThreads * 16);
  };

  Cursor ask{
      .task = static_cast<int>(threadIdx.x) / 32, .token = 0, .column = 0, .next = 0, .end = 0};
  ask.open(p, s, kColumns, first_piece, pieces, tasks);
  Cursor use = ask;
  const auto request = [&](int stage) {
    if (ask.task < tasks) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (ask.next + i < ask.end && ask.column < p.hidden) {
          const std::int64_t row = s.row[ask.next + i];
          ptx::cp_async_16(slot(stage, i), rows + row * p.hidden + ask.column, 16);
        }
      }
      ask.next += kBatch;
      if (ask.next >= ask.end) {
        ask.task += kWarps;
        ask.open(p, s, kColumns, first_piece, pieces, tasks);
      }
    }
    ptx::cp_async_commit();
  };

  for (int stage = 0; stage < kStages - 1; ++stage) request(stage);
  PieceSum<Out, kLevels, kColumns> sum(p);
  int stage = 0;
  bool first = true;
  while (use.task < tasks) {
    if (first) sum.begin(first_token + use.token, use.column);
    request((stage + kStages - 1) % kStages);
    ptx::cp_async_wait<kStages - 1>();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (use.next + i < use.end) {
        const int4 bits = ptx::load_shared_16(slot(stage, i));
        sum.template add<In>(s.group[use.next + i], s.weight[use.next + i], bits);
      }
    }
    use.next += kBatch;
    first = use.next >= use.end;
    if (first) {
      sum.finish();
      use.task += kWarps;
      use.open(p, s, kColumns, first_piece, pieces, tasks);
    }
    stage = (stage + 1) % kStages;
  }
  ptx::cp_async_wait<0>();
}

using CombineKernel = void (*)(CombineParams);

template <typename In, typename Out>
CombineKernel kernel_for(std::int32_t width) {
  return width <= 8 ? combine_kernel<In, Out, 3> : combine_kernel<In, Out, 6>;
}

template <typename In>
CombineKernel kernel_for(DType out, std::int32_t width) {
  switch (out) {
    case DType::kBF16: return kernel_for<In, __nv_bfloat16>(width);
    case DType::kF16: return kernel_for<In, __half>(width);
    default: return kernel_for<In, float>(width);
  }
}

CombineKernel kernel_for(DType in, DType out, std::int32_t width) {
  switch (in) {
    case DType::kBF16: return kernel_for<__nv_bfloat16>(out, width);
    case DType::kF16: return kernel_for<__half>(out, width);
    default: return kernel_for<float>(out, width);
  }
}

/// The most rows a token can have, as far as the plan's room says.
std::int64_t rows_per_token(const PlanView& plan) {
  const std::int64_t num_tokens = std::max<std::int64_t>(1, plan.num_tokens());
  return std::max<std::int64_t>(1, (plan.token_row.shape[0] + num_tokens - 1) / num_tokens);
}

std::optional<std::string> reject(const CombineArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.reduced.subtree.num_groups > kMaxGroups) return "more than 64 reduction groups";
  if (rows_per_token(args.plan) > kMaxBlockRows) return "more than 512 rows a token";
  if (args.rows.row_bytes() % 16 != 0) return "rows are not multiples of 16 bytes";
  if (!is_aligned_16(args.rows.data) || !is_aligned_16(args.reduced.sums.data)) {
    return "rows or sums are not aligned to 16 bytes";
  }
  return std::nullopt;
}

/// Several waves of blocks where there are tokens enough, else pieces of tokens.
void choose_grid(CombineParams& params, std::int64_t most_rows) {
  const std::int64_t wave = 3 * std::int64_t{num_multiprocessors()};
  const std::int64_t room = std::min<std::int64_t>(kMaxBlockTokens, kMaxBlockRows / most_rows);
  params.tokens_per_block =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(params.num_tokens / (4 * wave), 1, room));
  const std::int64_t blocks =
      (params.num_tokens + params.tokens_per_block - 1) / params.tokens_per_block;
  const std::int64_t share = std::clamp<std::int64_t>(wave / blocks, 1, params.pieces);
  params.pieces_per_block = static_cast<std::int32_t>((params.pieces + share - 1) / share);
}

void run(const CombineArgs& args) {
  const std::int64_t num_tokens = args.plan.num_tokens();
  const std::int64_t hidden = args.rows.cols;
  if (num_tokens == 0 || hidden == 0) return;
  const Subtree& subtree = args.reduced.subtree;
  const std::int64_t columns = 16 / size_of(args.rows.dtype);
  CombineParams params{
      .rows = args.rows.data,
      .sums = args.reduced.sums.data,
      .expert_begin = args.plan.expert_begin.data,
      .row_weight = args.plan.row_weight.data,
      .token_begin = args.plan.token_begin.data,
      .token_row = args.plan.token_row.data,
      .num_tokens = static_cast<std::int32_t>(num_tokens),
      .hidden = static_cast<std::int32_t>(hidden),
      .tokens_per_block = 0,
      .pieces = static_cast<std::int32_t>((hidden + 32 * columns - 1) / (32 * columns)),
      .pieces_per_block = 0,
      .num_groups = subtree.num_groups,
      .width = tree_width(subtree.num_groups),
      .each_group = args.reduced.each_group,
      .border = {}};
  for (std::int32_t g = 0; g + 1 < subtree.num_groups; ++g) {
    params.border[g] =
        std::clamp(subtree.order.begin(subtree.first_group + g + 1) - args.first_expert, 0,
                   args.plan.num_experts);
  }
  choose_grid(params, rows_per_token(args.plan));
  const CombineKernel kernel = kernel_for(args.rows.dtype, args.reduced.sums.dtype, params.width);
  SWITCHYARD_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes));
  const auto blocks_for = [](std::int32_t size, std::int32_t share) {
    return static_cast<unsigned>((size + share - 1) / share);
  };
  const dim3 grid(blocks_for(params.num_tokens, params.tokens_per_block),
                  blocks_for(params.pieces, params.pieces_per_block));
  kernel<<<grid, kThreads, kRingBytes, static_cast<cudaStream_t>(args.execution.stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<CombineArgs> kCombineCuda{"cuda.tree", reject, run};

}  // namespace switchyard
