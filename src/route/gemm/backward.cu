// The router product's way back on a GPU. dtokens = dlogits gate is bound by writing [T, H] in f32.
// dgate = dlogits^T tokens is bound by reading the tokens once: up to 128 experts share a tile's, T
// is cut into parts where tiles alone would not fill the device, and a second kernel adds the parts
// in order. How T is cut depends on the sizes alone, not on the device.
#include "route/gemm/backward.cuh"

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/prepare_once.hpp"
#include "core/shape_check.hpp"
#include "route/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

using namespace router_backward;

constexpr int kBlocksWanted = 264;
constexpr std::int64_t kFewestTokensOfPart = 256;

/// Sums of dlogits over the tokens of a part: a lane an expert, a warp every eighth token.
__global__ void __launch_bounds__(kThreads) bias_kernel(const __grid_constant__ ProductParams p) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float sums[kWarps][32];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int expert = static_cast<int>(blockIdx.x) * 32 + lane;
  const std::int64_t begin = std::int64_t{blockIdx.y} * p.part_tokens;
  const std::int64_t end = min(p.num_tokens, begin + p.part_tokens);
  float sum = 0.0F;
  if (expert < p.num_experts) {
#pragma unroll 4
    for (std::int64_t t = begin + warp; t < end; t += kWarps) {
      sum = __fadd_rn(sum, p.dlogits[t * p.num_experts + expert]);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || expert >= p.num_experts) return;
  for (int w = 1; w < kWarps; ++w) sum = __fadd_rn(sum, sums[w][lane]);
  p.out[std::int64_t{blockIdx.y} * p.num_experts + expert] = sum;
}

struct AddPartsParams {
  const float* parts;  // [num_parts, size]
  void* out;           // [size]
  std::int64_t size;
  std::int32_t num_parts;
  bool accumulate;
};

template <typename Out>
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(const __grid_constant__ AddPartsParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.size) return;
  float sum = 0.0F;
#pragma unroll 4
  for (int part = 0; part < p.num_parts; ++part) {
    sum = __fadd_rn(sum, __ldcs(p.parts + part * p.size + i));
  }
  Out& out = static_cast<Out*>(p.out)[i];
  if (p.accumulate) sum = __fadd_rn(static_cast<float>(out), sum);
  if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
    out = __float2bfloat16_rn(sum);
  } else if constexpr (std::is_same_v<Out, __half>) {
    out = __float2half_rn(sum);
  } else {
    out = sum;
  }
}

std::int64_t blocks_of(std::int64_t size, std::int64_t share) { return (size + share - 1) / share; }

/// Rows of a tile for so many.
int tile_rows(std::int64_t rows) {
  if (rows <= 16) return 16;
  // The widest operands of 128 rows take 112 KB.
  const bool large = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= 120 * 1024;
  return rows <= 64 || !large ? 64 : 128;
}

/// Parts that T is cut into, for dgate and dbias.
struct Parts {
  std::int64_t count, tokens;
};
Parts parts_for(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t hidden) {
  const std::int64_t rows = num_experts <= 16 ? 16 : num_experts <= 64 ? 64 : 128;
  const std::int64_t tiles = blocks_of(num_experts, rows) * blocks_of(hidden, kColumns);
  const std::int64_t wanted =
      std::min(blocks_of(kBlocksWanted, std::max<std::int64_t>(tiles, 1)),
               blocks_of(std::max<std::int64_t>(num_tokens, 1), kFewestTokensOfPart));
  const std::int64_t tokens = blocks_of(blocks_of(num_tokens, wanted), kDepth) * kDepth;
  return {.count = std::max<std::int64_t>(1, num_tokens == 0 ? 1 : blocks_of(num_tokens, tokens)),
          .tokens = tokens};
}

template <typename Tile>
void launch_tile(const ProductParams& params, std::int64_t rows, std::int64_t parts,
                 cudaStream_t stream) {
  constexpr int kBytes = 2 * Tile::kStageBytes;
  const auto kernel = product_kernel<Tile>;
  prepare_once(reinterpret_cast<const void*>(kernel), [kernel] {
    SWITCHYARD_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  });
  const dim3 grid(static_cast<unsigned>(blocks_of(params.hidden, kColumns)),
                  static_cast<unsigned>(blocks_of(rows, Tile::kRows)),
                  static_cast<unsigned>(parts));
  kernel<<<grid, kThreads, kBytes, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

template <bool kOfTokens>
void launch(DType factor, const ProductParams& params, std::int64_t rows, std::int64_t parts,
            cudaStream_t stream) {
  const auto of_type = [&]<typename T>(T) {
    switch (tile_rows(rows)) {
      case 16: return launch_tile<Tile<T, 16, kOfTokens>>(params, rows, parts, stream);
      case 64: return launch_tile<Tile<T, 64, kOfTokens>>(params, rows, parts, stream);
      default: return launch_tile<Tile<T, 128, kOfTokens>>(params, rows, parts, stream);
    }
  };
  switch (factor) {
    case DType::kBF16: return of_type(__nv_bfloat16{});
    case DType::kF16: return of_type(__half{});
    default: return of_type(float{});
  }
}

void add_parts(const AddPartsParams& params, DType out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(params.size, kThreads));
  switch (out) {
    case DType::kBF16:
      add_parts_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case DType::kF16: add_parts_kernel<__half><<<blocks, kThreads, 0, stream>>>(params); break;
    default: add_parts_kernel<float><<<blocks, kThreads, 0, stream>>>(params); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

std::optional<std::string> reject(const RouterGemmBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.tokens.cols % 8 != 0) return "hidden size is not a multiple of 8";
  if (!is_aligned_16(args.tokens.data) || !is_aligned_16(args.gate.data) ||
      !is_aligned_16(args.dtokens.data)) {
    return "tokens, gate or dtokens are not aligned to 16 bytes";
  }
  constexpr std::int64_t kMostTokens = 65535 * std::int64_t{64};
  if (args.tokens.rows > kMostTokens) return "more tokens than a grid has rows";
  return std::nullopt;
}

void run(const RouterGemmBackwardArgs& args) {
  const std::int64_t num_tokens = args.tokens.rows;
  const std::int64_t num_experts = args.gate.rows;
  const std::int64_t hidden = args.gate.cols;
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const Parts parts = parts_for(num_tokens, num_experts, hidden);
  ProductParams params{.dlogits = args.dlogits.data,
                       .factor = args.gate.data,
                       .out = args.dtokens.data,
                       .num_tokens = num_tokens,
                       .num_experts = static_cast<std::int32_t>(num_experts),
                       .hidden = static_cast<std::int32_t>(hidden),
                       .part_tokens = static_cast<std::int32_t>(parts.tokens),
                       .vector_rows = num_experts % 4 == 0 && is_aligned_16(args.dlogits.data)};
  if (args.dtokens.data != nullptr && num_tokens > 0) {
    launch<true>(args.gate.dtype, params, num_tokens, 1, stream);
  }
  if (args.dgate.data == nullptr && args.dbias.data == nullptr) return;
  const std::int64_t bytes = router_gemm_backward_workspace_bytes(num_tokens, num_experts, hidden);
  require(args.execution.workspace != nullptr && bytes <= args.execution.workspace_bytes,
          "router_gemm_backward needs {} bytes of workspace, has {}", bytes,
          args.execution.workspace_bytes);
  auto* const scratch = static_cast<float*>(args.execution.workspace);
  AddPartsParams sums{.parts = scratch,
                      .num_parts = static_cast<std::int32_t>(parts.count),
                      .accumulate = args.accumulate};
  if (args.dgate.data != nullptr) {
    params.factor = args.tokens.data;
    params.out = scratch;
    launch<false>(args.tokens.dtype, params, num_experts, parts.count, stream);
    sums.out = args.dgate.data;
    sums.size = num_experts * hidden;
    add_parts(sums, args.dgate.dtype, stream);
  }
  if (args.dbias.data == nullptr) return;
  params.out = scratch + parts.count * num_experts * hidden;
  const dim3 grid(static_cast<unsigned>(blocks_of(num_experts, 32)),
                  static_cast<unsigned>(parts.count));
  bias_kernel<<<grid, kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
  sums.parts = params.out;
  sums.out = args.dbias.data;
  sums.size = num_experts;
  add_parts(sums, DType::kF32, stream);
}

}  // namespace

const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardCuda{"cuda.tensor_cores", reject,
                                                                     run};

std::int64_t router_gemm_backward_workspace_bytes(std::int64_t max_tokens, std::int64_t num_experts,
                                                  std::int64_t hidden) {
  return 4 * parts_for(max_tokens, num_experts, hidden).count * num_experts * (hidden + 1);
}

}  // namespace switchyard
