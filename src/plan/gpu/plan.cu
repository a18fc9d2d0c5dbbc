// Plan on a GPU, one launch: a stable counting sort of the kept assignments by expert. Bound by
// latency, not by its few hundred kilobytes: a launch, one meeting of all blocks, three trips to
// memory. A block takes neighbouring tokens, a thread one assignment of a tile of whole tokens. A
// few assignments are compared with each other instead (few.cu), and compact layouts of a tile a
// block go without the meeting (tiles.cu).
#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"
#include "core/shape_check.hpp"
#include "plan/gpu/call.hpp"
#include "plan/gpu/counting.cuh"
#include "plan/gpu/few.hpp"
#include "plan/gpu/plan_kernel.cuh"
#include "plan/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

using namespace planning;
using counting::kThreads;

struct Shared {
  std::uint32_t total[counting::kMaxExperts];  // rows wanted, over all blocks
  std::uint32_t begin[counting::kMaxExperts];  // first row of the expert
  std::uint32_t base[counting::kMaxExperts];   // rank of the next assignment
  std::uint32_t count[counting::kMaxExperts];  // of this block, or of a tile
  unsigned long long expert_sums[33];
  std::uint32_t row_sums[33];
  std::int32_t row[kThreads];  // of the tile's assignments, or kNoRow
};

constexpr std::int32_t kNoRow = 0x7fffffff;

__device__ __forceinline__ std::uint32_t rows_in_layout(const PlanParams& p, std::uint32_t rows) {
  if (p.layout == LayoutKind::kPadded) return p.capacity;
  return (rows + p.alignment - 1) / p.alignment * p.alignment;
}

/// Where each expert begins; returns the rows of all tokens before this block's.
__device__ std::uint32_t place_experts(const PlanParams& p, Shared& s) {
  const int e = static_cast<int>(threadIdx.x);
  const bool inside = e < p.num_experts;
  const std::uint32_t wanted = inside ? s.total[e] : 0;
  const std::uint32_t rows = min(wanted, p.capacity);
  // Both sums in one scan: rows of the layout below, rows of earlier blocks above.
  const unsigned long long before = inside ? min(s.base[e], p.capacity) : 0;
  const unsigned long long both = before << 32 | (inside ? rows_in_layout(p, rows) : 0);
  unsigned long long all = 0;
  const auto begin = static_cast<std::uint32_t>(counting::scan_block(both, s.expert_sums, &all));
  if (inside) s.begin[e] = begin;
  if (blockIdx.x == 0 && inside) {
    p.expert_begin[e] = static_cast<std::int32_t>(begin);
    p.expert_rows[e] = static_cast<std::int32_t>(rows);
    if (wanted > rows && p.status != nullptr) atomicAdd(&p.status->lost_rows, wanted - rows);
  }
  if (blockIdx.x == 0 && e == 0) p.expert_begin[p.num_experts] = static_cast<std::int32_t>(all);
  __syncthreads();
  return static_cast<std::uint32_t>(all >> 32);
}

/// Padding rows of the experts that fall to this block.
__device__ void fill_padding(const PlanParams& p, const Shared& s) {
  if (p.layout != LayoutKind::kPadded && p.alignment == 1) return;
  for (int e = static_cast<int>(blockIdx.x); e < p.num_experts; e += static_cast<int>(gridDim.x)) {
    const std::uint32_t rows = min(s.total[e], p.capacity);
    const std::uint32_t end = s.begin[e] + rows_in_layout(p, rows);
    for (std::uint32_t row = s.begin[e] + rows + threadIdx.x; row < end; row += kThreads) {
      p.row_token[row] = -1;
      p.row_weight[row] = 0.0F;
    }
  }
}

/// Puts this thread's assignment, the rank-th of its expert, in its row; `rows_before` rows are
/// listed for the tokens before the tile. Returns how many rows the tile adds.
__device__ __forceinline__ std::uint32_t place_item(const PlanParams& p, Shared& s,
                                                    const Item& item, bool inside,
                                                    std::uint32_t rank, std::uint32_t rows_before) {
  const int thread = static_cast<int>(threadIdx.x);
  const bool valid = item.expert >= 0 && rank < p.capacity;
  const std::int32_t row = valid ? static_cast<std::int32_t>(s.begin[item.expert] + rank) : kNoRow;
  s.row[thread] = row;
  if (valid) p.row_weight[row] = item.weight;
  std::uint32_t total = 0;
  const std::uint32_t place = counting::scan_block(valid ? 1U : 0U, s.row_sums, &total);
  if (!inside) return total;
  const int token = item.index / p.top_k;
  const int k = item.index - token * p.top_k;
  if (k == 0) p.token_begin[token] = static_cast<std::int32_t>(rows_before + place);
  if (!valid) return total;
  p.row_token[row] = token;
  // Rank among the token's rows: those before in k that are higher make room, those after that
  // are lower come first.
  const std::int32_t* const rows = s.row + thread - k;
  int shift = 0;
  for (int other = 0; other < p.top_k; ++other) {
    const std::int32_t its = rows[other];
    if (other < k && its != kNoRow && its > row) --shift;
    if (other > k && its < row) ++shift;
  }
  p.token_row[static_cast<int>(rows_before + place) + shift] = row;
  return total;
}

/// kOneTile: a block has one tile, which stays in registers while the blocks meet.
template <bool kOneTile>
__global__ void __launch_bounds__(kThreads) plan_kernel(const PlanParams p) {
  __shared__ Shared s;
  extern __shared__ std::uint16_t tile[];  // [32, El]
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * p.tokens_per_block;
  const int begin = min(first, p.num_tokens) * p.top_k;
  const int end = min(first + p.tokens_per_block, p.num_tokens) * p.top_k;
  const int tile_size = kThreads / p.top_k * p.top_k;
  for (int e = thread; e < p.num_experts; e += kThreads) s.total[e] = s.base[e] = s.count[e] = 0;
  ptx::start_after_previous_kernel();

  Item item{.index = begin + thread, .expert = -1, .weight = 0.0F};
  std::uint32_t rank = 0;
  if constexpr (kOneTile) {
    const bool inside = begin + thread < end;
    item = load_item(p, begin + thread, inside);
    count_bad_id(p, begin + thread, inside);
    rank = counting::rank_in_block(item.expert, p.num_experts, tile, s.count);
  } else {
    __syncthreads();
    for (int i = begin + thread; i < end; i += kThreads) {
      const int e = load_item(p, i, true).expert;
      if (e >= 0) atomicAdd(s.count + e, 1U);
      count_bad_id(p, i, true);
    }
    __syncthreads();
  }
  unsigned ticket = 0;
  if (gridDim.x == 1) {  // few tokens: no way through memory
    for (int e = thread; e < p.num_experts; e += kThreads) s.total[e] = s.count[e];
    __syncthreads();
  } else {
    for (int e = thread; e < p.num_experts; e += kThreads) {
      p.counts[static_cast<int>(blockIdx.x) * p.num_experts + e] = s.count[e];
    }
    ticket = counting::meet(p.workspace);
    counting::sum_blocks(p.counts, p.num_experts, s.total, s.base);
  }
  std::uint32_t rows_before = place_experts(p, s);
  fill_padding(p, s);
  if constexpr (kOneTile) {
    if (item.expert >= 0) rank += s.base[item.expert];
    rows_before += place_item(p, s, item, begin + thread < end, rank, rows_before);
  } else {
    for (int at = begin; at < end; at += tile_size) {
      const bool inside = thread < tile_size && at + thread < end;
      item = load_item(p, at + thread, inside);
      rank = counting::rank_in_block(item.expert, p.num_experts, tile, s.count);
      if (item.expert >= 0) rank += s.base[item.expert];
      rows_before += place_item(p, s, item, inside, rank, rows_before);
      __syncthreads();
      for (int e = thread; e < p.num_experts; e += kThreads) s.base[e] += s.count[e];
    }
  }
  if (blockIdx.x == gridDim.x - 1 && thread == 0) {
    p.token_begin[p.num_tokens] = static_cast<std::int32_t>(rows_before);
  }
  counting::leave(p.workspace, ticket);
}

struct Grid {
  std::int32_t blocks;
  std::int32_t tokens_per_block;
};

/// One tile a block as long as there are enough multiprocessors.
Grid grid_for(std::int64_t num_tokens, std::int64_t top_k, int multiprocessors) {
  const std::int64_t tokens_per_tile = kThreads / top_k;
  const std::int64_t tiles =
      std::max<std::int64_t>(1, (num_tokens + tokens_per_tile - 1) / tokens_per_tile);
  const std::int64_t tiles_per_block = (tiles + multiprocessors - 1) / multiprocessors;
  return {static_cast<std::int32_t>((tiles + tiles_per_block - 1) / tiles_per_block),
          static_cast<std::int32_t>(tiles_per_block * tokens_per_tile)};
}

void run(const PlanArgs& args) {
  const auto [params, blocks] = prepare(args);
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const bool one_tile = params.tokens_per_block * std::max(1, params.top_k) <= kThreads;
  const std::size_t tile_bytes = static_cast<std::size_t>(params.num_experts) * 32 * 2;
  if (blocks == 1) {
    const auto kernel = one_tile ? plan_kernel<true> : plan_kernel<false>;
    allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
    return launch_overlapped(kernel, 1, counting::kThreads, tile_bytes, stream, params);
  }
  launch_together(one_tile ? plan_kernel<true> : plan_kernel<false>, blocks, counting::kThreads,
                  tile_bytes, stream, params);
}

}  // namespace

std::optional<std::string> planning::reject_on_gpu(const PlanArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  const auto* dense = std::get_if<DenseAssignments>(&args.assignments);
  if (dense == nullptr) return "takes a dense routing, not a list of assignments";
  if (args.plan.num_experts > counting::kMaxExperts) return "more than 1024 experts a rank";
  if (dense->expert.shape[1] > kThreads) return "top_k exceeds 1024";
  return std::nullopt;
}

PlanCall planning::prepare(const PlanArgs& args) {
  const PlanView& plan = args.plan;
  const auto& dense = std::get<DenseAssignments>(args.assignments);
  const std::int64_t num_tokens = dense.expert.shape[0];
  const std::int64_t top_k = std::max<std::int64_t>(1, dense.expert.shape[1]);
  const std::int64_t rows =
      max_rows(args.layout, num_tokens, top_k, plan.num_experts, args.padded_rows);
  require(rows <= plan.row_token.shape[0], "the layout may need {} rows, row_token has room for {}",
          rows, plan.row_token.shape[0]);
  require(num_tokens * top_k <= plan.token_row.shape[0],
          "the tokens may need {} rows, token_row has room for {}", num_tokens * top_k,
          plan.token_row.shape[0]);
  const Grid grid = grid_for(num_tokens, top_k, num_multiprocessors());
  const std::int64_t bytes = counting::workspace_bytes(grid.blocks, plan.num_experts);
  require(args.execution.workspace != nullptr && bytes <= args.execution.workspace_bytes,
          "plan needs {} bytes of workspace, has {}", bytes, args.execution.workspace_bytes);
  auto* workspace = static_cast<std::byte*>(args.execution.workspace);
  PlanParams params = params_without_memory(args);
  params.workspace = reinterpret_cast<StageWorkspace*>(workspace);
  params.counts = reinterpret_cast<std::uint32_t*>(workspace + sizeof(StageWorkspace));
  params.tokens_per_block = grid.tokens_per_block;
  params.layout = args.layout.kind;
  if (args.layout.kind == LayoutKind::kAligned) {
    params.alignment = static_cast<std::uint32_t>(args.layout.alignment);
  }
  if (args.layout.kind == LayoutKind::kPadded) {
    params.capacity = static_cast<std::uint32_t>(args.padded_rows);
  }
  return {params, grid.blocks};
}

const Implementation<PlanArgs> kPlanCudaCounting{"cuda.counting", planning::reject_on_gpu, run};

std::int64_t plan_workspace_bytes(std::int64_t max_tokens, std::int64_t top_k,
                                  std::int64_t num_experts) {
  const Grid grid = grid_for(max_tokens, std::max<std::int64_t>(1, top_k), num_multiprocessors());
  return counting::workspace_bytes(grid.blocks, num_experts);
}

}  // namespace switchyard
