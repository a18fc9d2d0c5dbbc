// Plan of up to 64 thousand assignments of a compact layout: a stable counting sort in one launch,
// a thread an assignment. Bound by latency. Blocks tell each other their counts in words that carry
// their own mark: who needs one reads until it is there, and nobody waits for a barrier or a fence.
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"
#include "plan/gpu/call.hpp"
#include "plan/gpu/plan_kernel.cuh"
#include "plan/gpu/tiles.hpp"
#include "plan/implementations.hpp"

namespace switchyard::planning {
namespace {

constexpr unsigned kAll = 0xffffffffU;
constexpr int kWarps = kTileSize / 32;
constexpr std::uint32_t kPosted = 0x80000000U;  // the mark; counts of a block are below 2^10
constexpr std::int32_t kNoRow = 0x7fffffff;

/// Counts of two experts lie in a word, 16 bits each.
template <int kWords>
struct Shared {
  // So that the lanes of a column scan meet no bank twice.
  static constexpr int kStride = kWords + 1024 / kTileSize;
  /// [warps, words]: counts, then how many of the expert are in earlier warps.
  std::uint32_t tile[(kWarps * kStride + 3) / 4 * 4];
  std::uint32_t total[kWords];            // over all blocks
  std::uint32_t before[kWords];           // in earlier blocks
  std::uint32_t begin[2 * kWords];        // first row for this block, from the first of 32 experts
  std::uint32_t rows[2 * kWords / 32];    // of 32 experts
  std::uint32_t listed[2 * kWords / 32];  // of those, in earlier blocks
  std::uint32_t valid[kWarps];            // assignments that a warp keeps
  PlanTurn turn;

  __device__ __forceinline__ std::uint16_t* counts(int warp) {
    return reinterpret_cast<std::uint16_t*>(tile + warp * kStride);
  }
  __device__ __forceinline__ void clear() {
    constexpr int kVectors = sizeof(tile) / 16;
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kVectors; i += kTileSize) {
      if (i + thread < kVectors)
        reinterpret_cast<uint4*>(tile)[i + thread] = make_uint4(0, 0, 0, 0);
    }
    if (thread < kWords) total[thread] = before[thread] = 0;
  }
};

__device__ __forceinline__ std::uint32_t load_relaxed(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// The sum over the lanes up to this one, of those kStep apart.
template <int kStep = 1>
__device__ __forceinline__ std::uint32_t sum_up_to(std::uint32_t x) {
#pragma unroll
  for (int offset = kStep; offset < 32; offset *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAll, x, offset);
    if (static_cast<int>(threadIdx.x) % 32 >= offset) x += other;
  }
  return x;
}

/// The lanes with the same expert, of [-1, kExperts). A vote for each bit: a match takes longer.
template <int kExperts>
__device__ __forceinline__ unsigned peers_of(int expert, unsigned valid) {
  unsigned peers = expert < 0 ? ~valid : valid;
#pragma unroll
  for (int bit = 1; bit < kExperts; bit *= 2) {
    const bool is = (expert & bit) != 0;
    const unsigned set = __ballot_sync(kAll, is);
    peers &= is ? set : ~set;
  }
  return peers;
}

/// Each column of the tile becomes sums of the rows before; its total goes to all blocks.
template <int kWords>
__device__ __forceinline__ void scan_columns(Shared<kWords>& s, std::uint32_t* posted) {
  constexpr int kParts = kTileSize / kWords;  // of a column: neighbours in a warp
  constexpr int kRows = kWarps / kParts;
  constexpr int kColumns = 32 / kParts;  // of a warp
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int part = lane / kColumns;
  const int word = static_cast<int>(threadIdx.x) / 32 * kColumns + lane % kColumns;
  std::uint32_t* const column = s.tile + part * kRows * Shared<kWords>::kStride + word;
  std::uint32_t here[kRows];
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    here[i] = column[i * Shared<kWords>::kStride];
    sum += here[i];
  }
  const std::uint32_t upto = sum_up_to<kColumns>(sum);
  if (part == kParts - 1) {
    store_relaxed(posted + static_cast<int>(blockIdx.x) * kWords + word, upto | kPosted);
  }
  std::uint32_t before = upto - sum;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    column[i * Shared<kWords>::kStride] = before;
    before += here[i];
  }
}

/// Sums of what all blocks, and those before this one, have posted.
template <int kWords>
__device__ __forceinline__ void sum_posted(Shared<kWords>& s, const std::uint32_t* posted) {
  constexpr int kAtOnce = 16;
  constexpr int kParts = kTileSize / kWords;
  const int blocks = static_cast<int>(gridDim.x);
  const int word = static_cast<int>(threadIdx.x) % kWords;
  std::uint32_t all = 0;
  std::uint32_t before = 0;
  for (int first = static_cast<int>(threadIdx.x) / kWords; first < blocks;
       first += kAtOnce * kParts) {
    std::uint32_t count[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = first + i * kParts;
      count[i] = block < blocks ? load_relaxed(posted + block * kWords + word) : kPosted;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = first + i * kParts;
      while ((count[i] & kPosted) == 0) count[i] = load_relaxed(posted + block * kWords + word);
      all += count[i] & ~kPosted;
      before += block < static_cast<int>(blockIdx.x) ? count[i] & ~kPosted : 0;
    }
  }
  atomicAdd(s.total + word, all);
  atomicAdd(s.before + word, before);
}

/// This thread's expert: its rows, and where they begin among those of its warp's experts.
struct ExpertRows {
  std::uint32_t rows = 0;
  std::uint32_t begin = 0;
};

template <int kWords>
__device__ __forceinline__ ExpertRows place_experts(Shared<kWords>& s) {
  const int e = static_cast<int>(threadIdx.x);
  ExpertRows mine;
  if (e >= 2 * kWords) return mine;
  const auto half = [e](const std::uint32_t* words) {
    return words[e / 2] >> (e % 2 * 16) & 0xffffU;
  };
  mine.rows = half(s.total);
  const std::uint32_t before = half(s.before);
  const std::uint32_t upto = sum_up_to(mine.rows);
  mine.begin = upto - mine.rows;
  s.begin[e] = mine.begin + before;
  const std::uint32_t listed = __reduce_add_sync(kAll, before);
  if (e % 32 == 31) {
    s.rows[e / 32] = upto;
    s.listed[e / 32] = listed;
  }
  return mine;
}

/// `bases`: lane i has the first row of experts 32 i and up.
template <int kWords>
__device__ __forceinline__ void write_experts(const PlanParams& p, const ExpertRows& mine,
                                              std::uint32_t bases) {
  const int e = static_cast<int>(threadIdx.x);
  if (blockIdx.x != 0 || e >= 2 * kWords) return;
  const std::uint32_t begin = __shfl_sync(kAll, bases, e / 32) + mine.begin;
  if (e < p.num_experts) {
    p.expert_begin[e] = static_cast<std::int32_t>(begin);
    p.expert_rows[e] = static_cast<std::int32_t>(mine.rows);
  }
  if (e == p.num_experts - 1) {
    p.expert_begin[p.num_experts] = static_cast<std::int32_t>(begin + mine.rows);
  }
}

/// Writes this thread's row; `listed` rows belong to the tokens of earlier warps.
__device__ __forceinline__ void write_item(const PlanParams& p, const Item& item, bool inside,
                                           std::int32_t row, unsigned valid, std::uint32_t listed) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // A token's rows lie in neighbouring lanes.
  std::uint32_t below = 0;
  for (int other = 1; other < p.top_k; ++other) {
    below += __shfl_xor_sync(kAll, row, other) < row ? 1 : 0;
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == kTileSize - 1) {
    p.token_begin[p.num_tokens] =
        static_cast<std::int32_t>(listed + static_cast<std::uint32_t>(__popc(valid)));
  }
  if (!inside) return;
  const int k = lane & (p.top_k - 1);
  const int token = item.index >> (31 - __clz(p.top_k));
  const unsigned of_earlier_tokens = (1U << (lane - k)) - 1;
  const std::uint32_t place =
      listed + static_cast<std::uint32_t>(__popc(valid & of_earlier_tokens));
  if (k == 0) p.token_begin[token] = static_cast<std::int32_t>(place);
  if (item.expert < 0) return;
  p.row_token[row] = token;
  p.row_weight[row] = item.weight;
  p.token_row[place + below] = row;
}

template <int kWords>
__global__ void __launch_bounds__(kTileSize, 1)
    plan_tiles_kernel(const __grid_constant__ PlanParams p) {
  constexpr int kSums = 2 * kWords / 32;
  __shared__ __align__(16) Shared<kWords> s;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int index = static_cast<int>(blockIdx.x) * kTileSize + thread;
  const bool inside = index < p.num_tokens * p.top_k;
  s.clear();
  __syncthreads();
  ptx::start_after_previous_kernel();

  PlanTurn turn{};
  if (thread == 0) turn = p.workspace->plan_turn;
  const Item item = load_item<true>(p, index, inside);
  const unsigned valid = __ballot_sync(kAll, item.expert >= 0);
  const unsigned peers = peers_of<2 * kWords>(item.expert, valid);
  auto rank = static_cast<std::uint32_t>(__popc(peers & ((1U << lane) - 1)));
  std::uint16_t* const counts = s.counts(warp);
  if (item.expert >= 0 && rank == 0) {
    counts[item.expert] = static_cast<std::uint16_t>(__popc(peers));
  }
  if (lane == 0) s.valid[warp] = static_cast<std::uint32_t>(__popc(valid));
  if (thread == 0) s.turn = turn;
  __syncthreads();
  turn = s.turn;
  std::uint32_t* const posted = p.workspace->plan_counts[turn.calls % 2];
  scan_columns(s, posted);
#pragma unroll 1
  for (std::uint32_t i = static_cast<std::uint32_t>(index); i < turn.posted;
       i += gridDim.x * kTileSize) {
    p.workspace->plan_counts[(turn.calls + 1) % 2][i] = 0;
  }
  sum_posted(s, posted);
  __syncthreads();
  // All blocks have posted, so all have read whose turn it is.
  if (blockIdx.x == 0 && thread == 0) {
    p.workspace->plan_turn = {.calls = turn.calls + 1, .posted = gridDim.x * kWords};
  }
  if (item.expert >= 0) rank += counts[item.expert];
  const ExpertRows mine = place_experts(s);
  __syncthreads();
  const std::uint32_t rows = lane < kSums ? s.rows[lane] : 0;
  const std::uint32_t bases = sum_up_to(rows) - rows;
  const std::uint32_t listed = __reduce_add_sync(
      kAll, (lane < kSums ? s.listed[lane] : 0) + (lane < warp ? s.valid[lane] : 0));
  const std::uint32_t base = __shfl_sync(kAll, bases, max(item.expert, 0) / 32);
  const std::int32_t row =
      item.expert < 0 ? kNoRow : static_cast<std::int32_t>(base + s.begin[item.expert] + rank);
  write_experts<kWords>(p, mine, bases);
  write_item(p, item, inside, row, valid, listed);
}

/// All blocks resident at once, and on Hopper before the previous kernel has ended.
template <int kWords>
void launch(const PlanParams& params, cudaStream_t stream) {
  const int size = params.num_tokens * params.top_k;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((size + kTileSize - 1) / kTileSize));
  config.blockDim = dim3(kTileSize);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 ? 2 : 1;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, plan_tiles_kernel<kWords>, params));
}

std::optional<std::string> reject(const PlanArgs& args) {
  if (const auto reason = reject_on_gpu(args)) return reason;
  if (args.layout.kind != LayoutKind::kCompact) return "only for the compact layout";
  const auto& ids = std::get<DenseAssignments>(args.assignments).expert;
  if (!are_tiles(ids.shape[0], ids.shape[1], args.plan.num_experts, num_multiprocessors())) {
    return "only for 2 or more tiles of 512 assignments, resident together, 65535 in all; top_k a "
           "power of two up to 32; up to 256 experts";
  }
  return std::nullopt;
}

void run(const PlanArgs& args) {
  const PlanParams params = prepare(args).params;
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  if (params.num_experts <= 128) return launch<64>(params, stream);
  launch<kMostTileExperts / 2>(params, stream);
}

}  // namespace
}  // namespace switchyard::planning

namespace switchyard {

const Implementation<PlanArgs> kPlanCudaTiles{"cuda.tiles", planning::reject, planning::run};

}  // namespace switchyard
