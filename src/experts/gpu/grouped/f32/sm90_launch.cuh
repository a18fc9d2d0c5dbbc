#pragma once

// Host side of one f32 kernel for Hopper.

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/tensor_map.hpp"
#include "experts/gpu/grouped/f32/sm90_multiply.cuh"
#include "experts/gpu/grouped/product.hpp"

namespace switchyard {

template <Epilogue kEpilogue>
void launch_f32_sm90(const GroupedProduct& product, cudaStream_t stream) {
  constexpr bool kGated = is_gated(kEpilogue);
  constexpr int kOutColumns = kGated ? f32_sm90::kHalfM : f32_sm90::kTileM;
  const auto columns = static_cast<std::int32_t>(product.columns);
  const std::int32_t weight_rows = columns * (kGated ? 2 : 1);
  const CUtensorMap map =
      tensor_map_of(product.layer.weight_maps,
                    TensorMapArgs{.data = product.weights,
                                  .dtype = DType::kF32,
                                  .rows = std::int64_t{product.layer.num_experts} * weight_rows,
                                  .cols = product.depth,
                                  .box_rows = f32_sm90::kHalfM,
                                  .box_cols = f32_sm90::kChunk});
  const f32_sm90::Params params{
      .schedule = {product.layer.expert_begin, product.layer.expert_rows, product.layer.num_experts,
                   (columns + kOutColumns - 1) / kOutColumns, product.counter},
      .epilogue = {product.out,
                   product.bias,
                   columns,
                   {product.layer.activation, product.layer.alpha, product.layer.limit}},
      .rows = static_cast<const float*>(product.rows),
      .row_token = product.row_token,
      .depth = static_cast<std::int32_t>(product.depth),
      .weight_rows = weight_rows,
      .preactivation = static_cast<float*>(product.layer.preactivation)};
  const auto kernel = f32_sm90::grouped_gemm_f32_sm90<kEpilogue>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  kernel<<<static_cast<unsigned>(product.num_sms), f32_sm90::kThreads, f32_sm90::kSharedBytes,
           stream>>>(map, params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
