// The Hopper router GEMM: when it runs, and its launch. See router_gemm_sm90.cuh.
#include "route/gemm/sm90.cuh"

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/tensor_map.hpp"
#include "core/shape_check.hpp"
#include "route/gemm/bits16.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

// Fewer tokens are quicker in small tiles that many blocks share along H.
constexpr std::int64_t kFewestTokens = 65;

template <typename Shape>
void launch_shape(const RouterGemmArgs& args, int splits) {
  const CUtensorMap tokens = make_tensor_map({.data = args.tokens.data,
                                              .dtype = args.tokens.dtype,
                                              .rows = args.tokens.rows,
                                              .cols = args.tokens.cols,
                                              .box_rows = Shape::kRows});
  const CUtensorMap gate =
      tensor_map_of(args.gate_maps, TensorMapArgs{.data = args.gate.data,
                                                  .dtype = args.gate.dtype,
                                                  .rows = args.gate.rows,
                                                  .cols = args.gate.cols,
                                                  .box_rows = Shape::kColumns / 2});
  const RouterSm90Params params{
      .bias = args.bias.data,
      .logits = args.logits.data,
      .num_tokens = args.tokens.rows,
      .num_experts = static_cast<std::int32_t>(args.gate.rows),
      .steps = static_cast<std::int32_t>((args.tokens.cols + Shape::kDepth - 1) / Shape::kDepth),
      .splits = splits,
      .vector_rows = args.gate.rows % 4 == 0 && is_aligned_16(args.logits.data)};
  const auto kernel = router_gemm_sm90<Shape>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, kRouterStack, static_cast<unsigned>(splits)};
  constexpr std::int64_t kStackRows = kRouterStack * Shape::kRows;
  const std::int64_t stacks = (args.tokens.rows + kStackRows - 1) / kStackRows;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>((args.gate.rows + Shape::kColumns - 1) / Shape::kColumns),
           static_cast<unsigned>(kRouterStack * stacks), static_cast<unsigned>(splits));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = static_cast<cudaStream_t>(args.execution.stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, kernel, tokens, gate, params));
}

template <typename T>
void launch_type(const RouterGemmArgs& args, RouterTile tile) {
  switch (tile.columns) {
    case 256: return launch_shape<RouterSm90Shape<T, 256>>(args, tile.splits);
    case 192: return launch_shape<RouterSm90Shape<T, 192>>(args, tile.splits);
    case 128: return launch_shape<RouterSm90Shape<T, 128>>(args, tile.splits);
    default: return launch_shape<RouterSm90Shape<T, 64>>(args, tile.splits);
  }
}

std::optional<std::string> reject(const RouterGemmArgs& args) {
  if (const auto reason = reject_unless_16_bit(args)) return reason;
  if (args.tokens.rows < kFewestTokens) return "fewer tokens than its tiles are worth";
  constexpr std::int64_t kMostTokens = 65534 * kRouterTileRows;
  if (args.tokens.rows > kMostTokens) return "more tokens than a grid has rows";
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return "needs sm_90";
  return std::nullopt;
}

RouterTile tile_of(const RouterGemmArgs& args) {
  return choose_router_tile(args.tokens.rows, args.gate.rows, args.tokens.cols,
                            num_multiprocessors());
}

std::string tile_name(const RouterGemmArgs& args) {
  const RouterTile tile = tile_of(args);
  return fmt::format("tiles of {} x {}, the sum in {}", kRouterTileRows, tile.columns, tile.splits);
}

void run(const RouterGemmArgs& args) {
  const RouterTile tile = tile_of(args);
  if (args.tokens.dtype == DType::kBF16) return launch_type<__nv_bfloat16>(args, tile);
  launch_type<__half>(args, tile);
}

}  // namespace

const Implementation<RouterGemmArgs> kRouterGemmSm90{"cuda.sm90", reject, run, tile_name};

}  // namespace switchyard
