// Combine of tokens with 3 to 16 rows of 16 bits, on Hopper, where the tree has eight leaves. Bound
// by memory: a warp takes a piece of a token at a time; bulk copies bring its rows to one of two
// slots of shared memory while the lanes add up what lies in the other. The tree is written out,
// absent leaves as +0, so that no register is chosen by a number: the kernel for all trees, which
// does choose, issues about twice the instructions a row and is bound by those.
#include <algorithm>

#include "combine/gpu/call.hpp"
#include "combine/implementations.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"
#include "core/gpu/ptx.cuh"
#include "core/tree_width.hpp"

namespace switchyard {
namespace {

constexpr int kWarps = 6;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocks = 2;  // resident on a multiprocessor
constexpr int kSlots = 2;   // of a warp
constexpr int kSlotBytes = 8192;
constexpr int kLeaves = 8;
constexpr int kMostTokens = 64;  // of a block
constexpr int kMostRows = 512;   // of a block
constexpr std::int64_t kFewestTokens = 2048;

/// The rows of a block's tokens.
struct BlockRows {
  std::uint64_t leaf_ends[kMostTokens];  // a byte each: of the token's rows
  std::int32_t begin[kMostTokens + 1];   // into the lists below
  std::int32_t group_end[kLeaves];       // first row of the layout of the next group
  std::int32_t row[kMostRows];
  float weight[kMostRows];
};
constexpr int kBarriersAt = kWarps * kSlots * kSlotBytes;
constexpr int kRowsAt = kBarriersAt + kWarps * kSlots * 8;
constexpr int kSharedBytes = kRowsAt + static_cast<int>(sizeof(BlockRows));
static_assert(kBlocks * (kSharedBytes + 1024) <= 228 * 1024);

struct ManyParams {
  const std::byte* rows;             // [rows, row_bytes]
  void* sums;                        // [N, H]
  const float* added;                // [N, H] or null
  const std::int32_t* expert_begin;  // [El+1]
  const float* row_weight;           // [rows]
  const std::int32_t* token_begin;   // [N+1]
  const std::int32_t* token_row;     // [N*K]
  std::int32_t num_tokens, hidden, row_bytes;
  std::int32_t tokens_per_block;
  std::int32_t num_groups;
  std::int32_t border[kLeaves];  // local expert at which group g + 1 begins
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Returns how many tokens the block has.
__device__ __forceinline__ int load_block_rows(const ManyParams& p, int first_token, BlockRows& s) {
  const int thread = static_cast<int>(threadIdx.x);
  const int count = min(p.tokens_per_block, p.num_tokens - first_token);
  const int base = p.token_begin[first_token];
  if (thread <= count) s.begin[thread] = p.token_begin[first_token + thread] - base;
  if (thread < p.num_groups - 1) s.group_end[thread] = p.expert_begin[p.border[thread]];
  __syncthreads();
  for (int i = thread; i < s.begin[count]; i += kThreads) {
    const int row = p.token_row[base + i];
    s.row[i] = row;
    s.weight[i] = p.row_weight[row];
  }
  __syncthreads();
  if (thread < count) {
    const int begin = s.begin[thread];
    const int rows = s.begin[thread + 1] - begin;
    std::uint64_t ends = 0;
    int end = 0;
    for (int g = 0; g < kLeaves; ++g) {  // a token's rows ascend
      while (end < rows && (g >= p.num_groups - 1 || s.row[begin + end] < s.group_end[g])) ++end;
      ends |= static_cast<std::uint64_t>(end) << (8 * g);
    }
    s.leaf_ends[thread] = ends;
  }
  __syncthreads();
  return count;
}

/// The sum of one piece of a token: kChunks runs of 16 bytes a lane.
template <typename In, int kPieceBytes>
struct Piece {
  static constexpr int kChunks = kPieceBytes / 512;
  static constexpr int kColumns = kPack<In>;
  static constexpr int kSize = kChunks * kColumns;

  std::uint32_t slot;  // the lane's first 16 bytes of the first row
  const float* weights;
  std::uint64_t ends;
  int row = 0;

  template <bool kFirst>
  __device__ __forceinline__ void add_row(float (&sum)[kSize]) {
    const float weight = weights[row];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float y[kColumns];
      unpack16(ptx::load_shared_16(slot + static_cast<std::uint32_t>(row * kPieceBytes + c * 512)),
               y, In{});
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        float& to = sum[c * kColumns + i];
        to = __fmaf_rn(weight, y[i], kFirst ? 0.0F : to);
      }
    }
    ++row;
  }

  /// 2^kLevel leaves from kLeaf on.
  template <int kLevel, int kLeaf>
  __device__ __forceinline__ void add_leaves(float (&sum)[kSize]) {
    if constexpr (kLevel == 0) {
      const int end = static_cast<int>(ends >> (8 * kLeaf)) & 255;
      if (row < end) {
        add_row<true>(sum);
#pragma unroll 1
        while (row < end) add_row<false>(sum);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum[i] = 0.0F;
      }
    } else {
      float right[kSize];
      add_leaves<kLevel - 1, kLeaf>(sum);
      add_leaves<kLevel - 1, kLeaf + (1 << (kLevel - 1))>(right);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] = __fadd_rn(sum[i], right[i]);
    }
  }
};

/// Which piece of which of the block's tokens.
struct Item {
  int token, piece;
  __device__ __forceinline__ Item(int number, int pieces)
      : token(number / pieces), piece(number % pieces) {}
  __device__ __forceinline__ void advance(int pieces) {
    piece += kWarps;
    while (piece >= pieces) {
      piece -= pieces;
      ++token;
    }
  }
};

#endif

/// kMost: rows of a token.
template <typename In, typename Out, int kMost, bool kAdded>
__global__ void __launch_bounds__(kThreads, kBlocks)
    combine_many_kernel(const __grid_constant__ ManyParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kPieceBytes = kSlotBytes / kMost;
  using Sum = Piece<In, kPieceBytes>;
  extern __shared__ __align__(128) std::byte shared[];
  auto& s = *reinterpret_cast<BlockRows*>(shared + kRowsAt);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t slots = base + static_cast<std::uint32_t>(warp * kSlots * kSlotBytes);
  const std::uint32_t barriers = base + static_cast<std::uint32_t>(kBarriersAt + warp * kSlots * 8);
  if (lane == 0) {
    for (std::uint32_t i = 0; i < kSlots; ++i) ptx::mbarrier_init(barriers + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }
  const int first_token = static_cast<int>(blockIdx.x) * p.tokens_per_block;
  const int tokens = load_block_rows(p, first_token, s);
  const int pieces = (p.row_bytes + kPieceBytes - 1) / kPieceBytes;

  const auto ask = [&](const Item& item, std::uint32_t n) {
    if (item.token >= tokens) return;
    const int begin = s.begin[item.token];
    const int count = s.begin[item.token + 1] - begin;
    const int offset = item.piece * kPieceBytes;
    const auto bytes = static_cast<std::uint32_t>(min(kPieceBytes, p.row_bytes - offset));
    const std::uint32_t full = barriers + n % kSlots * 8;
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(full, static_cast<std::uint32_t>(count) * bytes);
    }
    __syncwarp();
    if (lane < count) {
      ptx::bulk_load(
          slots + n % kSlots * kSlotBytes + static_cast<std::uint32_t>(lane * kPieceBytes),
          p.rows + std::int64_t{s.row[begin + lane]} * p.row_bytes + offset, bytes, full);
    }
  };

  Item use(warp, pieces);
  Item next = use;
  ask(next, 0);
  for (std::uint32_t n = 0; use.token < tokens; ++n) {
    next.advance(pieces);
    ask(next, n + 1);
    const std::int64_t token = first_token + use.token;
    const int column = (use.piece * (kPieceBytes / 16) + lane) * Sum::kColumns;
    const std::int64_t at = token * p.hidden + column;
    constexpr int kStride = 32 * Sum::kColumns;
    float added[kAdded ? Sum::kSize : 1];
    if constexpr (kAdded) {
#pragma unroll
      for (int c = 0; c < Sum::kSize; c += 4) {
        const int further = c / Sum::kColumns * kStride + c % Sum::kColumns;
        float4 four{};
        if (column + further < p.hidden) {
          four = __ldcs(reinterpret_cast<const float4*>(p.added + at + further));
        }
        added[c] = four.x, added[c + 1] = four.y, added[c + 2] = four.z, added[c + 3] = four.w;
      }
    }
    Sum piece{.slot = slots + n % kSlots * kSlotBytes + static_cast<std::uint32_t>(lane * 16),
              .weights = s.weight + s.begin[use.token],
              .ends = s.leaf_ends[use.token]};
    ptx::mbarrier_wait(barriers + n % kSlots * 8, n / kSlots & 1U);
    float sum[Sum::kSize];
    piece.template add_leaves<3, 0>(sum);
    if constexpr (kAdded) {
#pragma unroll
      for (int i = 0; i < Sum::kSize; ++i) sum[i] = __fadd_rn(sum[i], added[i]);
    }
    Out* const out = static_cast<Out*>(p.sums) + at;
#pragma unroll
    for (int c = 0; c < Sum::kChunks; ++c) {
      float part[Sum::kColumns];
#pragma unroll
      for (int i = 0; i < Sum::kColumns; ++i) part[i] = sum[c * Sum::kColumns + i];
      if (column + c * kStride >= p.hidden) continue;
      if constexpr (std::is_same_v<Out, float>) {
        store_floats(out + c * kStride, part);
      } else {
        ptx::store_global_16(out + c * kStride, pack16(part, Out{}));
      }
    }
    use.advance(pieces);
    __syncwarp();  // all lanes have read the slot that is asked for next
  }
#endif
}

using Kernel = void (*)(ManyParams);

template <typename In, typename Out, int kMost>
Kernel kernel_of(bool added) {
  return added ? combine_many_kernel<In, Out, kMost, true>
               : combine_many_kernel<In, Out, kMost, false>;
}

template <typename In>
Kernel kernel_of(const CombineArgs& args, bool eight) {
  const bool added = args.added.data != nullptr;
  if (args.reduced.sums.dtype == DType::kF32) {
    return eight ? kernel_of<In, float, 8>(added) : kernel_of<In, float, 16>(added);
  }
  return eight ? kernel_of<In, In, 8>(added) : kernel_of<In, In, 16>(added);
}

std::optional<std::string> reject(const CombineArgs& args) {
  if (auto reason = combining::reject_of_known_rows(args)) return reason;
  const DType in = args.rows.dtype;
  const DType out = args.reduced.sums.dtype;
  const std::int64_t rows = args.plan.most_rows;
  if (size_of(in) != 2 || (out != in && out != DType::kF32) || args.reduced.each_group ||
      tree_width(args.reduced.subtree.num_groups) != kLeaves || rows < 3 || rows > 16 ||
      args.plan.num_tokens() < kFewestTokens ||
      device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) {
    return "only on Hopper, for 2048 or more tokens of 3 to 16 rows of 16 bits each, in a tree of "
           "eight groups, to sums in the rows' type or f32";
  }
  return std::nullopt;
}

void run(const CombineArgs& args) {
  if (args.rows.cols == 0) return;
  const std::int64_t num_tokens = args.plan.num_tokens();
  const std::int64_t most_rows = args.plan.most_rows;
  ManyParams params{};
  combining::set_call(params, args);
  params.added = args.added.data;
  params.num_tokens = static_cast<std::int32_t>(num_tokens);
  params.hidden = static_cast<std::int32_t>(args.rows.cols);
  params.row_bytes = static_cast<std::int32_t>(args.rows.row_bytes());
  std::int32_t border[combining::kMaxGroups] = {};
  combining::find_borders(args, border);
  std::copy_n(border, kLeaves, params.border);
  // Full waves of blocks, as few as possible.
  const auto parts = [](std::int64_t size, std::int64_t share) {
    return (size + share - 1) / share;
  };
  const std::int64_t wave = std::int64_t{kBlocks} * num_multiprocessors();
  const std::int64_t room = std::min<std::int64_t>(kMostTokens, kMostRows / most_rows);
  const std::int64_t waves = parts(num_tokens, wave * room);
  params.tokens_per_block = static_cast<std::int32_t>(parts(num_tokens, waves * wave));
  const bool eight = most_rows <= 8;
  const Kernel kernel = args.rows.dtype == DType::kBF16 ? kernel_of<__nv_bfloat16>(args, eight)
                                                        : kernel_of<__half>(args, eight);
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  const auto blocks = static_cast<unsigned>(parts(num_tokens, params.tokens_per_block));
  kernel<<<blocks, kThreads, kSharedBytes, static_cast<cudaStream_t>(args.execution.stream)>>>(
      params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<CombineArgs> kCombineCudaBulkMany{"cuda.bulk-many", reject, run};

}  // namespace switchyard
