// Combine on a GPU: the weighted sum of each token's rows by the fixed order of sums. Bound by
// memory: K rows in, one out. A block takes a few tokens: it first learns all their rows, then its
// warps walk over pieces of tokens, 16 bytes a lane. Rows arrive in shared memory ahead of their
// use, in slots that only the lane which asked for them reads: no thread waits for another.
#include <algorithm>

#include "combine/gpu/block_rows.cuh"
#include "combine/gpu/tree.cuh"
#include "combine/implementations.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"
#include "core/gpu/ptx.cuh"
#include "core/tree_width.hpp"

namespace switchyard {
namespace {

using namespace combining;

/// The sum of one piece of a token by the tree, written when complete: kChunks runs of kColumns
/// columns a lane, under one control flow. kAdded: what is added to the whole sum is asked for at
/// the beginning and has come when the rows have.
template <typename In, typename Out, int kLevels, bool kAdded>
class PieceSum {
 public:
  static constexpr int kColumns = kPack<In>;
  static constexpr int kStride = 32 * kColumns;  // from one run to the next

  /// `column`: the lane's first.
  __device__ __forceinline__ PieceSum(const CombineParams& p, std::int64_t token, int column)
      : p_(p), token_(token), column_(column) {
    if constexpr (kEarly) load_added();
  }

  __device__ __forceinline__ void add(int group, float weight, const int4 (&bits)[kChunks]) {
    float y[kSize];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float part[kColumns];
      unpack16(bits[c], part, In{});
#pragma unroll
      for (int i = 0; i < kColumns; ++i) y[c * kColumns + i] = part[i];
    }
    if (group != group_) {
      enter(group);
#pragma unroll
      for (int c = 0; c < kSize; ++c) tree_.sum[c] = __fmaf_rn(weight, y[c], 0.0F);
    } else {
#pragma unroll
      for (int c = 0; c < kSize; ++c) tree_.sum[c] = __fmaf_rn(weight, y[c], tree_.sum[c]);
    }
  }

  __device__ __forceinline__ void finish() {
    if (p_.each_group) {
      if (group_ >= 0) store(group_);
      clear_groups(group_ + 1, p_.num_groups);
      return;
    }
    if (group_ >= 0) tree_.finish(p_.width);
    if constexpr (kAdded) {
      if constexpr (!kEarly) load_added();
#pragma unroll
      for (int c = 0; c < kSize; ++c) tree_.sum[c] = __fadd_rn(tree_.sum[c], added_[c]);
    }
    store(0);
  }

 private:
  static constexpr int kSize = kChunks * kColumns;
  // Where registers are left for it.
  static constexpr bool kEarly = kAdded && kLevels == 3;

  __device__ __forceinline__ void load_added() {
    const float* const from = p_.added + token_ * p_.hidden + column_;
#pragma unroll
    for (int c = 0; c < kSize; c += 4) {
      const int at = c / kColumns * kStride + c % kColumns;
      float4 four{};
      if (column_ + at < p_.hidden) four = __ldcs(reinterpret_cast<const float4*>(from + at));
      added_[c] = four.x, added_[c + 1] = four.y, added_[c + 2] = four.z, added_[c + 3] = four.w;
    }
  }

  __device__ __forceinline__ void enter(int group) {
    if (p_.each_group) {
      if (group_ >= 0) store(group_);
      clear_groups(group_ + 1, group);
    } else if (group_ < 0) {
      tree_.begin(group);
    } else {
      tree_.next_leaf(group);
    }
    group_ = group;
  }

  __device__ __forceinline__ void store(int group, const float (&values)[kSize]) const {
    const std::int64_t row = p_.each_group ? token_ * p_.num_groups + group : token_;
    Out* const out = static_cast<Out*>(p_.sums) + row * p_.hidden + column_;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float part[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) part[i] = values[c * kColumns + i];
      if (column_ + c * kStride < p_.hidden) store_floats(out + c * kStride, part);
    }
  }
  __device__ __forceinline__ void store(int group) const { store(group, tree_.sum); }

  __device__ __forceinline__ void clear_groups(int begin, int end) const {
    const float zero[kSize] = {};
    for (int g = begin; g < end; ++g) store(g, zero);
  }

  const CombineParams& p_;
  std::int64_t token_;
  int column_;
  int group_ = -1;
  RegisterTree<kLevels, kSize> tree_;
  float added_[kAdded ? kSize : 1];
};

/// kBatch rows a stage; `kLevels` of the tree can wait at once.
template <typename In, typename Out, int kLevels, int kBatch, bool kAdded>
__global__ void __launch_bounds__(kThreads, kBatch == 2 ? 3 : 2)
    combine_kernel(const __grid_constant__ CombineParams p) {
  constexpr int kColumns = kPack<In>;
  __shared__ BlockRows s;
  extern __shared__ __align__(16) std::byte ring[];
  const int first_token = static_cast<int>(blockIdx.x) * p.tokens_per_block;
  const int first_piece = static_cast<int>(blockIdx.y) * p.pieces_per_block;
  const int tokens = load_block_rows(p, first_token, s);
  const Share share(min(p.pieces_per_block, p.pieces - first_piece), tokens);
  const std::uint32_t slots =
      ptx::shared_address(ring) + static_cast<std::uint32_t>(threadIdx.x) * 16;
  const In* const rows = static_cast<const In*>(p.rows);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto column_of = [&](int piece, int chunk) {
    return (((first_piece + piece) * kChunks + chunk) * 32 + lane) * kColumns;
  };
  const auto slot = [&](int stage, int i, int chunk) {
    return slots +
           static_cast<std::uint32_t>(((stage * kBatch + i) * kChunks + chunk) * kThreads * 16);
  };

  Cursor ask = share.start(s);
  Cursor use = ask;
  const auto request = [&](int stage) {
    if (!share.done(ask)) {
      const int column = column_of(ask.piece, 0);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (ask.next + i >= ask.end) continue;
        const In* const from = rows + std::int64_t{s.row[ask.next + i]} * p.hidden + column;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (column + c * 32 * kColumns < p.hidden) {
            ptx::cp_async_16(slot(stage, i, c), from + c * 32 * kColumns, 16);
          }
        }
      }
      ask.next += kBatch;
      if (ask.next >= ask.end) share.advance(ask, s);
    }
    ptx::cp_async_commit();
  };

  for (int stage = 0; stage < kStages - 1; ++stage) request(stage);
  int stage = 0;
  while (!share.done(use)) {
    PieceSum<In, Out, kLevels, kAdded> sum(p, first_token + use.token, column_of(use.piece, 0));
    do {
      request(stage == 0 ? kStages - 1 : stage - 1);
      ptx::cp_async_wait<kStages - 1>();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (use.next + i >= use.end) continue;
        const int group = s.group[use.next + i];
        const float weight = s.weight[use.next + i];
        int4 bits[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) bits[c] = ptx::load_shared_16(slot(stage, i, c));
        sum.add(group, weight, bits);
      }
      use.next += kBatch;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    } while (use.next < use.end);
    sum.finish();
    share.advance(use, s);
  }
  ptx::cp_async_wait<0>();
}

struct Choice {
  void (*kernel)(CombineParams);
  int ring_bytes;
  int blocks;  // resident on a multiprocessor
};

template <typename In, typename Out, bool kAdded>
Choice choice_for(std::int32_t width, std::int64_t most_rows) {
  constexpr auto ring_bytes = [](int batch) { return kStages * batch * kChunks * kThreads * 16; };
  if (width > 8) return {combine_kernel<In, Out, 6, 4, kAdded>, ring_bytes(4), 2};
  if (most_rows > 2) return {combine_kernel<In, Out, 3, 4, kAdded>, ring_bytes(4), 2};
  return {combine_kernel<In, Out, 0, 2, kAdded>, ring_bytes(2), 3};
}

Choice choice_for(const CombineArgs& args, std::int32_t width, std::int64_t most_rows) {
  const auto of_types = [&]<typename In, typename Out>(In, Out) {
    return args.added.data != nullptr ? choice_for<In, Out, true>(width, most_rows)
                                      : choice_for<In, Out, false>(width, most_rows);
  };
  const auto of_in = [&]<typename In>(In in) {
    switch (args.reduced.sums.dtype) {
      case DType::kBF16: return of_types(in, __nv_bfloat16{});
      case DType::kF16: return of_types(in, __half{});
      default: return of_types(in, float{});
    }
  };
  switch (args.rows.dtype) {
    case DType::kBF16: return of_in(__nv_bfloat16{});
    case DType::kF16: return of_in(__half{});
    default: return of_in(float{});
  }
}

std::string tree_name(const CombineArgs& args) {
  if (tree_width(args.reduced.subtree.num_groups) > 8) return "a tree of up to 64 leaves";
  return args.plan.most_rows > 2 ? "a tree of up to 8 leaves" : "two rows at most";
}

/// Full waves of blocks, as few as possible: each begins with three trips to memory. Where tokens
/// are too few, blocks share them.
void choose_grid(CombineParams& params, std::int64_t most_rows, int blocks_resident) {
  const std::int64_t wave = std::int64_t{blocks_resident} * num_multiprocessors();
  const std::int64_t room = std::min<std::int64_t>(kMaxBlockTokens, kMaxBlockRows / most_rows);
  const auto parts = [](std::int64_t size, std::int64_t share) {
    return (size + share - 1) / share;
  };
  const std::int64_t waves = parts(params.num_tokens, wave * room);
  const std::int64_t tokens = parts(params.num_tokens, waves * wave);
  const std::int64_t share =
      std::clamp<std::int64_t>(wave / parts(params.num_tokens, tokens), 1, params.pieces);
  params.tokens_per_block = static_cast<std::int32_t>(tokens);
  params.pieces_per_block = static_cast<std::int32_t>(parts(params.pieces, share));
}

void run(const CombineArgs& args) {
  const std::int64_t num_tokens = args.plan.num_tokens();
  const std::int64_t hidden = args.rows.cols;
  if (num_tokens == 0 || hidden == 0) return;
  const std::int64_t columns = 16 / size_of(args.rows.dtype);
  CombineParams params{};
  set_call(params, args);
  params.added = args.added.data;
  params.num_tokens = static_cast<std::int32_t>(num_tokens);
  params.hidden = static_cast<std::int32_t>(hidden);
  params.pieces =
      static_cast<std::int32_t>((hidden + 32 * kChunks * columns - 1) / (32 * kChunks * columns));
  params.width = tree_width(params.num_groups);
  params.each_group = args.reduced.each_group;
  combining::find_borders(args, params.border);
  const std::int64_t most_rows = args.plan.most_rows;
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const Choice choice = choice_for(args, params.width, most_rows);
  choose_grid(params, most_rows, choice.blocks);
  allow_most_shared_memory(reinterpret_cast<const void*>(choice.kernel));
  const auto blocks_for = [](std::int32_t size, std::int32_t share) {
    return static_cast<unsigned>((size + share - 1) / share);
  };
  const dim3 grid(blocks_for(params.num_tokens, params.tokens_per_block),
                  blocks_for(params.pieces, params.pieces_per_block));
  choice.kernel<<<grid, kThreads, static_cast<std::size_t>(choice.ring_bytes), stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

std::optional<std::string> combining::reject_on_gpu(const CombineArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.reduced.subtree.num_groups > kMaxGroups) return "more than 64 reduction groups";
  if (args.rows.row_bytes() % 16 != 0) return "rows are not multiples of 16 bytes";
  if (!is_aligned_16(args.rows.data) || !is_aligned_16(args.reduced.sums.data) ||
      !is_aligned_16(args.added.data)) {
    return "rows, sums or what is added to them are not aligned to 16 bytes";
  }
  return std::nullopt;
}

std::optional<std::string> combining::reject_of_known_rows(const CombineArgs& args) {
  if (auto reason = reject_on_gpu(args)) return reason;
  if (args.plan.most_rows == 0) return "a token may have any number of rows";
  if (args.plan.most_rows > kMaxBlockRows) return "more than 512 rows a token";
  return std::nullopt;
}

void combining::find_borders(const CombineArgs& args, std::int32_t (&border)[kMaxGroups]) {
  const Subtree& subtree = args.reduced.subtree;
  for (std::int32_t g = 0; g + 1 < subtree.num_groups; ++g) {
    border[g] = std::clamp(subtree.order.begin(subtree.first_group + g + 1) - args.first_expert, 0,
                           args.plan.num_experts);
  }
}

const Implementation<CombineArgs> kCombineCudaTree{"cuda.tree", combining::reject_of_known_rows,
                                                   run, tree_name};

}  // namespace switchyard
