// Home side of combine on a GPU: the parts of a token by the tree, the shared experts, one
// rounding. Bound by memory: a thread takes 8 (f32: 4) columns of a token.
#include <algorithm>

#include "combine/gpu/tree.cuh"
#include "combine/implementations.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"
#include "core/tree_width.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;
constexpr int kLevels = 6;

struct FinishParams {
  const void* partials;             // [parts * groups, H]
  const std::int32_t* partial_row;  // [T, R] or null
  const float* shared;              // [T, H] or null
  void* out;                        // [T, H]
  std::int64_t num_parts;
  std::int32_t num_tokens, num_ranks, groups, width, hidden;
};

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) finish_kernel(const FinishParams p) {
  constexpr int kColumns = kPack<In>;
  const int chunks = p.hidden / kColumns;
  const std::int64_t size = std::int64_t{p.num_tokens} * chunks;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; at < size;
       at += stride) {
    const std::int64_t token = at / chunks;
    const int column = static_cast<int>(at % chunks) * kColumns;
    RegisterTree<kLevels, kColumns> tree;
    bool any = false;
    for (int rank = 0; rank < p.num_ranks; ++rank) {
      const std::int64_t part =
          p.partial_row != nullptr ? __ldg(p.partial_row + token * p.num_ranks + rank) : token;
      if (part < 0 || part >= p.num_parts) continue;
      for (int g = 0; g < p.groups; ++g) {
        const int leaf = rank * p.groups + g;
        if (any) {
          tree.next_leaf(leaf);
        } else {
          tree.begin(leaf);
        }
        any = true;
        const In* const from =
            static_cast<const In*>(p.partials) + (part * p.groups + g) * p.hidden + column;
        unpack16(__ldcs(reinterpret_cast<const int4*>(from)), tree.sum, In{});
      }
    }
    if (any) tree.finish(p.width);
    if (p.shared != nullptr) {
      const float* const shared = p.shared + token * p.hidden + column;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) tree.sum[c] = __fadd_rn(tree.sum[c], __ldcs(shared + c));
    }
    store_floats(static_cast<Out*>(p.out) + token * p.hidden + column, tree.sum);
  }
}

using FinishKernel = void (*)(FinishParams);

template <typename In>
FinishKernel kernel_for(DType out) {
  switch (out) {
    case DType::kBF16: return finish_kernel<In, __nv_bfloat16>;
    case DType::kF16: return finish_kernel<In, __half>;
    default: return finish_kernel<In, float>;
  }
}

FinishKernel kernel_for(DType in, DType out) {
  switch (in) {
    case DType::kBF16: return kernel_for<__nv_bfloat16>(out);
    case DType::kF16: return kernel_for<__half>(out);
    default: return kernel_for<float>(out);
  }
}

std::int32_t ranks_of(const FinishArgs& args) {
  return args.partial_row.data != nullptr ? static_cast<std::int32_t>(args.partial_row.shape[1])
                                          : 1;
}

std::optional<std::string> reject(const FinishArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (ranks_of(args) * args.groups_per_row > 1 << kLevels) return "more than 64 parts a token";
  if (args.partials.row_bytes() % 16 != 0) return "partials are not multiples of 16 bytes";
  if (!is_aligned_16(args.partials.data) || !is_aligned_16(args.out.data) ||
      !is_aligned_16(args.shared.data)) {
    return "partials, shared or out are not aligned to 16 bytes";
  }
  return std::nullopt;
}

void run(const FinishArgs& args) {
  const std::int64_t num_tokens = args.out.rows;
  const std::int64_t hidden = args.out.cols;
  if (num_tokens == 0 || hidden == 0) return;
  const std::int32_t num_ranks = ranks_of(args);
  const FinishParams params{.partials = args.partials.data,
                            .partial_row = args.partial_row.data,
                            .shared = args.shared.data,
                            .out = args.out.data,
                            .num_parts = args.partials.rows / args.groups_per_row,
                            .num_tokens = static_cast<std::int32_t>(num_tokens),
                            .num_ranks = num_ranks,
                            .groups = args.groups_per_row,
                            .width = tree_width(num_ranks * args.groups_per_row),
                            .hidden = static_cast<std::int32_t>(hidden)};
  const std::int64_t columns = 16 / size_of(args.partials.dtype);
  const std::int64_t wanted = (num_tokens * (hidden / columns) + kThreads - 1) / kThreads;
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(wanted, num_multiprocessors() * 32));
  kernel_for(
      args.partials.dtype,
      args.out.dtype)<<<blocks, kThreads, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(
      params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<FinishArgs> kFinishCuda{"cuda.tree", reject, run};

}  // namespace switchyard
