#pragma once

// Host side of one f32 kernel.

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/grouped/f32/gemm.cuh"
#include "experts/gpu/grouped/product.hpp"

namespace switchyard {

template <Epilogue kEpilogue>
void launch_f32(const GroupedProduct& product, cudaStream_t stream) {
  constexpr bool kGated = is_gated(kEpilogue);
  constexpr int kOutColumns = kGated ? kF32TileN / 2 : kF32TileN;
  const auto columns = static_cast<std::int32_t>(product.columns);
  const Sm80Params params{
      .schedule = {product.layer.expert_begin, product.layer.expert_rows, product.layer.num_experts,
                   (columns + kOutColumns - 1) / kOutColumns, product.counter},
      .epilogue = {product.out,
                   product.bias,
                   columns,
                   {product.layer.activation, product.layer.alpha, product.layer.limit}},
      .rows = product.rows,
      .row_token = product.row_token,
      .weights = product.weights,
      .depth = static_cast<std::int32_t>(product.depth),
      .weight_rows = columns * (kGated ? 2 : 1),
      .preactivation = product.layer.preactivation};
  const auto kernel = grouped_gemm_f32<kEpilogue>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  kernel<<<static_cast<unsigned>(product.num_sms), kF32Threads, kF32SharedBytes, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
