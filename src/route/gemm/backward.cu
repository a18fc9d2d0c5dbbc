// The router product's way back on any GPU, of every type. dtokens = dlogits gate is bound by
// writing [T, H] in f32. dgate = dlogits^T tokens is bound by reading the tokens once: up to 128
// experts share a tile's, T is cut into parts where tiles alone would not fill the device, and a
// second kernel adds the parts in order. How T is cut depends on the sizes alone, not on the
// device.
#include "route/gemm/backward.cuh"

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "core/shape_check.hpp"
#include "route/gemm/backward_parts.hpp"
#include "route/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

using namespace router_backward;

constexpr int kBlocksWanted = 264;
constexpr std::int64_t kFewestTokensOfPart = 256;

/// Rows of a tile for so many.
int tile_rows(std::int64_t rows) {
  if (rows <= 16) return 16;
  // The widest operands of 128 rows take 112 KB.
  const bool large = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= 120 * 1024;
  return rows <= 64 || !large ? 64 : 128;
}

/// Never fewer for more tokens.
std::int64_t most_parts(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t hidden) {
  const std::int64_t rows = num_experts <= 16 ? 16 : num_experts <= 64 ? 64 : 128;
  const std::int64_t tiles = blocks_of(num_experts, rows) * blocks_of(hidden, kColumns);
  return std::min(blocks_of(kBlocksWanted, std::max<std::int64_t>(tiles, 1)),
                  blocks_of(std::max<std::int64_t>(num_tokens, 1), kFewestTokensOfPart));
}

Parts parts_for(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t hidden) {
  const std::int64_t wanted = most_parts(num_tokens, num_experts, hidden);
  const std::int64_t tokens = blocks_of(blocks_of(num_tokens, wanted), kDepth) * kDepth;
  return {.count = std::max<std::int64_t>(1, num_tokens == 0 ? 1 : blocks_of(num_tokens, tokens)),
          .tokens = tokens};
}

template <typename Tile>
void launch_tile(const ProductParams& params, std::int64_t rows, std::int64_t parts,
                 cudaStream_t stream) {
  constexpr int kBytes = 2 * Tile::kStageBytes;
  const auto kernel = product_kernel<Tile>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
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
  if (args.dgate.data != nullptr) {
    params.factor = args.tokens.data;
    params.out = scratch;
    launch<false>(args.tokens.dtype, params, num_experts, parts.count, stream);
    add_gate_parts(args, scratch, parts.count);
  }
  if (args.dbias.data == nullptr) return;
  make_bias_gradient(args, scratch + parts.count * num_experts * hidden, parts);
}

}  // namespace

const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardCuda{"cuda.tensor_cores", reject,
                                                                     run};

std::int64_t router_gemm_backward_workspace_bytes(std::int64_t max_tokens, std::int64_t num_experts,
                                                  std::int64_t hidden) {
  return std::max(4 * most_parts(max_tokens, num_experts, hidden) * num_experts * (hidden + 1),
                  router_backward::sm90_workspace_bytes(max_tokens, num_experts, hidden));
}

}  // namespace switchyard
