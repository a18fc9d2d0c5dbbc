// Host side of the grouped products with codes.

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/tensor_map.hpp"
#include "experts/gpu/grouped/coded/kernel.cuh"
#include "experts/gpu/grouped/coded/order.hpp"

namespace switchyard {
namespace {

void check(const CodedGroupedParams& p) {
  require(device_attribute(cudaDevAttrComputeCapabilityMajor) == 9,
          "grouped products with codes want compute capability 9.0");
  require(p.format == WeightFormat::kE4M3 || p.format == WeightFormat::kMxfp4,
          "weights in {} are not multiplied as codes", to_string(p.format));
  require(p.hidden > 0 && p.hidden % 8 == 0 && p.inner > 0 && p.inner % 8 == 0,
          "hidden={} and inner={} of products with codes want multiples of 8", p.hidden, p.inner);
  require(1 <= p.num_experts && p.num_experts <= kCodedMostExperts,
          "num_experts={} lies outside [1, {}]", p.num_experts, kCodedMostExperts);
  require(p.gated || p.activation != Activation::kClampedSwiglu,
          "clamped_swiglu needs gated experts");
  require(p.ordered == nullptr || coded::can_be_ordered(p.hidden, p.inner),
          "hidden={} and inner={} of rows in the order of codes want multiples of {}", p.hidden,
          p.inner, coded::kOrderedValues);
}

template <typename Shape>
void launch(const CodedGroupedParams& p, cudaStream_t stream) {
  constexpr bool kSecond = Shape::kEpilogue == CodedEpilogue::kLinear;
  constexpr int kMatrices = Shape::kGated ? 2 : 1;
  check(p);
  if (p.max_rows == 0) return;
  const std::int64_t depth = kSecond ? p.inner : p.hidden;
  const std::int64_t columns = kSecond ? p.hidden : p.inner;
  const CUtensorMap weights = tensor_map_of(
      p.weight_maps, StackMapArgs{.data = kSecond ? p.w2 : p.w13,
                                  .matrices = std::int64_t{p.num_experts} * kMatrices,
                                  .rows = coded::groups_of(columns),
                                  .row_bytes = coded::group_bytes(Shape::kFormat, depth),
                                  .box_matrices = kMatrices,
                                  .box_rows = Shape::kGroups / kMatrices,
                                  .box_bytes = Shape::kGroupBytes});
  if (Shape::kOrdered && !kSecond) {
    launch_order_rows({.format = p.format,
                       .x = p.x,
                       .num_tokens = p.num_tokens,
                       .row_token = p.row_token,
                       .end = p.expert_begin + p.num_experts,
                       .max_rows = p.max_rows,
                       .columns = p.hidden,
                       .out = p.ordered},
                      stream);
  }
  CUtensorMap rows = weights;
  if (Shape::kOrdered) {
    rows = make_tensor_map({.data = kSecond ? p.act : p.ordered,
                            .rows = p.max_rows,
                            .cols = depth,
                            .box_rows = Shape::kRowsOfCopy});
  }
  const CodedParams params{.x = static_cast<const std::byte*>(kSecond ? p.act : p.x),
                           .row_token = kSecond ? nullptr : p.row_token,
                           .scales = kSecond ? p.scales2 : p.scales13,
                           .bias = kSecond ? p.b2 : p.b13,
                           .out = kSecond ? p.y : p.act,
                           .expert_begin = p.expert_begin,
                           .expert_rows = p.expert_rows,
                           .num_experts = p.num_experts,
                           .depth = static_cast<std::int32_t>(depth),
                           .columns = static_cast<std::int32_t>(columns),
                           .activation = {p.activation, p.alpha, p.limit}};
  const auto kernel = grouped_coded<Shape>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount)));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = kSecond || Shape::kOrdered ? 1 : 0;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, kernel, weights, rows, params));
}

template <WeightFormat kFormat, CodedEpilogue kEpilogue>
void launch_of(const CodedGroupedParams& p, cudaStream_t stream) {
  // Rows of an expert at a time: as many as registers hold beside the numbers (e4m3 has a second
  // set of sums); gathering warps take some of them.
  constexpr int kPlainRows = 64;
  constexpr int kOrderedRows = kFormat == WeightFormat::kE4M3 ? 72 : 80;
  if (p.ordered == nullptr) {
    launch<CodedShape<kFormat, kEpilogue, CodedGather::kPlain, kPlainRows>>(p, stream);
  } else {
    launch<CodedShape<kFormat, kEpilogue, CodedGather::kOrdered, kOrderedRows>>(p, stream);
  }
}

template <CodedEpilogue kEpilogue>
void launch_of(const CodedGroupedParams& p, cudaStream_t stream) {
  if (p.format == WeightFormat::kMxfp4) {
    launch_of<WeightFormat::kMxfp4, kEpilogue>(p, stream);
  } else {
    launch_of<WeightFormat::kE4M3, kEpilogue>(p, stream);
  }
}

}  // namespace

void launch_coded_gate_up(const CodedGroupedParams& params, cudaStream_t stream) {
  if (params.gated) {
    launch_of<CodedEpilogue::kGated>(params, stream);
  } else {
    launch_of<CodedEpilogue::kPlain>(params, stream);
  }
}

void launch_coded_down(const CodedGroupedParams& params, cudaStream_t stream) {
  launch_of<CodedEpilogue::kLinear>(params, stream);
}

}  // namespace switchyard
