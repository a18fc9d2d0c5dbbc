#pragma once

// Host side of one Hopper kernel: tensor maps, parameters, launch.

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/tensor_map.hpp"
#include "experts/gpu/grouped/product.hpp"
#include "experts/gpu/grouped/sm90/kernel.cuh"

namespace switchyard {

template <typename Shape>
void launch_sm90_shape(const GroupedProduct& product, cudaStream_t stream) {
  const std::int32_t weight_rows =
      static_cast<std::int32_t>(product.columns) * (Shape::kGated ? 2 : 1);
  const CUtensorMap weights = tensor_map_of(
      product.layer.weight_maps, TensorMapArgs{.data = product.weights,
                                               .dtype = product.layer.dtype,
                                               .rows = product.layer.num_experts * weight_rows,
                                               .cols = product.depth,
                                               .box_rows = Shape::kTileN / 2});
  CUtensorMap rows = weights;
  if (!Shape::kGather) {
    rows = make_tensor_map({.data = product.rows,
                            .dtype = product.layer.dtype,
                            .rows = product.layer.max_rows,
                            .cols = product.depth,
                            .box_rows = kHalfRows});
  }
  CUtensorMap tall_weights = weights;
  if (Shape::kTalls) {
    tall_weights =
        tensor_map_of(product.layer.weight_maps, GatedMapArgs{.data = product.weights,
                                                              .dtype = product.layer.dtype,
                                                              .experts = product.layer.num_experts,
                                                              .rows = product.columns,
                                                              .cols = product.depth,
                                                              .box_rows = Shape::kTileN / 2});
  }
  const CUtensorMap out = make_tensor_map({.data = product.out,
                                           .dtype = product.layer.dtype,
                                           .rows = product.layer.max_rows,
                                           .cols = product.columns,
                                           .box_rows = kHalfRows,
                                           .box_cols = Shape::Out::kBoxColumns});
  const auto columns = static_cast<std::int32_t>(product.columns);
  const Sm90Params params{
      .schedule = {product.layer.expert_begin, product.layer.expert_rows, product.layer.num_experts,
                   (columns + Shape::kOutColumns - 1) / Shape::kOutColumns, product.counter},
      .epilogue = {product.out,
                   product.bias,
                   columns,
                   {product.layer.activation, product.layer.alpha, product.layer.limit}},
      .x = product.rows,
      .row_token = product.row_token,
      .depth = static_cast<std::int32_t>(product.depth),
      .weight_rows = weight_rows,
      .preactivation = product.layer.preactivation};
  const auto kernel = grouped_gemm_sm90<Shape>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  const unsigned grid = static_cast<unsigned>(product.num_sms) / 2 * 2;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = Shape::kEpilogue == Epilogue::kLinear ? 1 : 0;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, kernel, weights, rows, out, tall_weights, params));
  SWITCHYARD_CUDA(cudaGetLastError());
}

/// Both compute types.
template <Epilogue kEpilogue, bool kGather, bool kPingPong>
void launch_sm90_types(const GroupedProduct& product, cudaStream_t stream) {
  if (product.layer.dtype == DType::kBF16) {
    launch_sm90_shape<Sm90Shape<__nv_bfloat16, kEpilogue, kGather, kPingPong>>(product, stream);
  } else {
    launch_sm90_shape<Sm90Shape<__half, kEpilogue, kGather, kPingPong>>(product, stream);
  }
}

}  // namespace switchyard
