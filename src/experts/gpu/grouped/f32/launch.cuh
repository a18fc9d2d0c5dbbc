#pragma once

// Host side of one f32 kernel.

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/grouped/f32/gemm.cuh"
#include "experts/gpu/grouped/sm80/params.cuh"

namespace switchyard {

template <Epilogue kEpilogue>
void launch_f32(const GroupedProduct& product, cudaStream_t stream) {
  constexpr bool kGated = is_gated(kEpilogue);
  constexpr int kOutColumns = kGated ? kF32TileN / 2 : kF32TileN;
  const Sm80Params params = sm80_params(product, kGated, kOutColumns);
  const auto kernel = grouped_gemm_f32<kEpilogue>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  kernel<<<static_cast<unsigned>(product.num_sms), kF32Threads, kF32SharedBytes, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
