// Host side of the grouped products of e4m3, and rows that become e4m3.

#include <algorithm>

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
  SWITCHYARD_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       Shape::kSharedBytes));
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

constexpr int kQuantiseThreads = 256;

/// Sixteen lanes have the 128 values of a scale, eight each.
__global__ void __launch_bounds__(kQuantiseThreads)
    quantise_kernel(const __nv_bfloat16* rows, std::int64_t count, std::int32_t cols,
                    std::byte* codes, float* scales) {
  const std::int32_t blocks = (cols + 127) / 128;
  const int lane = static_cast<int>(threadIdx.x % 16);
  const std::int64_t stride = std::int64_t{gridDim.x} * kQuantiseThreads / 16;
  // All lanes of a warp go round together.
  const std::int64_t all = (count * blocks + 1) / 2 * 2;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kQuantiseThreads + threadIdx.x) / 16; i < all;
       i += stride) {
    const std::int64_t row = i / blocks;
    const auto column = static_cast<std::int32_t>(i - row * blocks) * 128 + lane * 8;
    const bool here = row < count && column < cols;
    int4 bits{};
    if (here) bits = *reinterpret_cast<const int4*>(rows + row * cols + column);
    const std::uint32_t words[4] = {
        static_cast<std::uint32_t>(bits.x), static_cast<std::uint32_t>(bits.y),
        static_cast<std::uint32_t>(bits.z), static_cast<std::uint32_t>(bits.w)};
    float values[8];
    float largest = 1e-4F;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      values[2 * k] = __uint_as_float(words[k] << 16);
      values[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000U);
      largest = fmaxf(largest, fmaxf(fabsf(values[2 * k]), fabsf(values[2 * k + 1])));
    }
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, distance));
    }
    const float scale = largest / 448.0F;
    const float inverse = 1.0F / scale;
    std::uint32_t out[2] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t two = __nv_cvt_float2_to_fp8x2(
          make_float2(values[2 * k] * inverse, values[2 * k + 1] * inverse), __NV_SATFINITE,
          __NV_E4M3);
      out[k / 2] |= two << (16 * (k % 2));
    }
    if (!here) continue;
    *reinterpret_cast<uint2*>(codes + row * cols + column) = {out[0], out[1]};
    if (lane == 0) scales[row * blocks + column / 128] = scale;
  }
}

}  // namespace

void launch_fp8_gate_up(const Fp8GroupedParams& params, cudaStream_t stream) {
  launch<true>(params, stream);
}

void launch_fp8_down(const Fp8GroupedParams& params, cudaStream_t stream) {
  launch<false>(params, stream);
}

void launch_fp8_quantise(const void* rows, std::int64_t count, std::int64_t cols, std::byte* codes,
                         float* scales, cudaStream_t stream) {
  require(cols % 16 == 0, "rows of {} values become e4m3: want a multiple of 16", cols);
  if (count == 0) return;
  const std::int64_t pieces = count * blocks_of(cols) * 16;
  const auto grid = static_cast<unsigned>(
      std::min<std::int64_t>((pieces + kQuantiseThreads - 1) / kQuantiseThreads, 1 << 16));
  quantise_kernel<<<grid, kQuantiseThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(rows),
                                                         count, static_cast<std::int32_t>(cols),
                                                         codes, scales);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
