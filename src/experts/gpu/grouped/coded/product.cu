// Host side of the grouped products with codes.

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/tensor_map.hpp"
#include "experts/gpu/grouped/coded/kernel.cuh"
#include "experts/gpu/grouped/coded/order.hpp"
#include "experts/gpu/grouped/coded/split.hpp"

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
  const bool splits = p.format == WeightFormat::kMxfp4;
  require(splits == (p.row_scales != nullptr) && (!splits || p.ordered != nullptr),
          "row_scales are for products with codes of mxfp4, which want them and room for rows");
}

/// Puts the rows that a product takes where its copies find them.
template <typename Shape>
void lay_rows(const CodedGroupedParams& p, std::int64_t depth, cudaStream_t stream) {
  constexpr bool kSecond = Shape::kEpilogue == CodedEpilogue::kLinear;
  const std::int32_t* const end = p.expert_begin + p.num_experts;
  if constexpr (Shape::kSplit) {
    launch_split_rows({.x = kSecond ? p.act : p.x,
                       .num_tokens = kSecond ? p.max_rows : p.num_tokens,
                       .row_token = kSecond ? nullptr : p.row_token,
                       .end = end,
                       .max_rows = p.max_rows,
                       .columns = depth,
                       .out = kSecond ? p.act : p.ordered,
                       .scales = p.row_scales,
                       .overlaps = kSecond},
                      stream);
  } else if constexpr (Shape::kOrdered && !kSecond) {
    launch_order_rows({.x = p.x,
                       .num_tokens = p.num_tokens,
                       .row_token = p.row_token,
                       .end = end,
                       .max_rows = p.max_rows,
                       .columns = depth,
                       .out = p.ordered},
                      stream);
  }
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
  lay_rows<Shape>(p, depth, stream);
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
                           .row_scales = p.row_scales,
                           .bias = kSecond ? p.b2 : p.b13,
                           .out = kSecond ? p.y : p.act,
                           .expert_begin = p.expert_begin,
                           .expert_rows = p.expert_rows,
                           .num_experts = p.num_experts,
                           .depth = static_cast<std::int32_t>(depth),
                           .columns = static_cast<std::int32_t>(columns),
                           .beside = !p.batch_invariant,
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

/// Rows of an expert at a time: as many as registers hold beside the numbers and two sets of sums;
/// warps that gather take some of them.
template <CodedEpilogue kEpilogue>
void launch_of(const CodedGroupedParams& p, cudaStream_t stream) {
  constexpr int kFewRows = 44;  // of an expert, up to which 48 are less time than 128
  if (p.format == WeightFormat::kMxfp4) {
    if (p.max_rows > std::int64_t{kFewRows} * p.num_experts) {
      launch<CodedShape<WeightFormat::kMxfp4, kEpilogue, CodedGather::kSplit, 128, 2>>(p, stream);
    } else {
      launch<CodedShape<WeightFormat::kMxfp4, kEpilogue, CodedGather::kSplit, 48>>(p, stream);
    }
  } else if (p.ordered == nullptr) {
    launch<CodedShape<WeightFormat::kE4M3, kEpilogue, CodedGather::kPlain, 64>>(p, stream);
  } else {
    launch<CodedShape<WeightFormat::kE4M3, kEpilogue, CodedGather::kOrdered, 72>>(p, stream);
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
