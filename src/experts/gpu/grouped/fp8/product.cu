// Host side of the grouped products of e4m3.

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/tensor_map.hpp"
#include "experts/gpu/grouped/fp8/kernel.cuh"

namespace switchyard {
namespace {

constexpr std::int32_t blocks_of(std::int64_t cols) {
  return static_cast<std::int32_t>((cols + 127) / 128);
}

void check(const Fp8GroupedParams& p) {
  require(device_attribute(cudaDevAttrComputeCapabilityMajor) == 9,
          "products of e4m3 want compute capability 9.0");
  require(p.hidden > 0 && p.hidden % 16 == 0 && p.inner > 0 && p.inner % 16 == 0,
          "hidden={} and inner={} of products of e4m3 want multiples of 16", p.hidden, p.inner);
  require(1 <= p.num_experts && p.num_experts <= 1024, "num_experts={} lies outside [1, 1024]",
          p.num_experts);
}

template <bool kGated>
void launch(const Fp8GroupedParams& p, cudaStream_t stream) {
  using Shape = Fp8Shape<kGated>;
  check(p);
  if (p.max_rows == 0) return;
  const std::int64_t depth = kGated ? p.hidden : p.inner;
  const std::int64_t columns = kGated ? p.inner : p.hidden;
  const CUtensorMap weights = tensor_map_of(
      p.weight_maps, StackMapArgs{.data = kGated ? p.w13 : p.w2,
                                  .matrices = std::int64_t{p.num_experts} * (kGated ? 2 : 1),
                                  .rows = coded::groups_of(columns),
                                  .row_bytes = coded::group_bytes(WeightFormat::kE4M3, depth),
                                  .box_rows = 128 / coded::kGroupRows,
                                  .box_bytes = 128 * coded::kGroupRows});
  CUtensorMap rows = weights;
  if (!kGated) {
    // Two codes as one value.
    rows = make_tensor_map({.data = p.act,
                            .dtype = DType::kBF16,
                            .rows = p.max_rows,
                            .cols = depth / 2,
                            .box_rows = kHalfRows});
  }
  const Sm90Params params{
      .schedule = {p.expert_begin, p.expert_rows, p.num_experts,
                   static_cast<std::int32_t>((columns + Shape::kOutColumns - 1) /
                                             Shape::kOutColumns),
                   p.counters == nullptr ? nullptr : p.counters + (kGated ? 0 : 32)},
      .epilogue = {p.y,
                   kGated ? p.b13 : p.b2,
                   static_cast<std::int32_t>(columns),
                   {p.activation, p.alpha, p.limit}},
      .x = kGated ? p.x.codes : p.act,
      .row_token = kGated ? p.row_token : nullptr,
      .depth = static_cast<std::int32_t>(depth / 2),
      .weight_rows = 0,
      .preactivation = nullptr};
  const Fp8Params fp8{.row_scales = kGated ? p.x.scales : p.act_scales,
                      .weight_scales = kGated ? p.scales13 : p.scales2,
                      .blocks = blocks_of(depth),
                      .row_blocks = blocks_of(columns),
                      .codes = p.act,
                      .scales = p.act_scales};
  const auto kernel = grouped_fp8<kGated>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  const auto grid = static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount)) / 2 * 2;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = kGated ? 0 : 1;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, kernel, weights, rows, params, fp8));
}

}  // namespace

void launch_fp8_gate_up(const Fp8GroupedParams& params, cudaStream_t stream) {
  launch<true>(params, stream);
}

void launch_fp8_down(const Fp8GroupedParams& params, cudaStream_t stream) {
  launch<false>(params, stream);
}

}  // namespace switchyard
