#pragma once

// Host side of one portable kernel.

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/grouped/sm80/gemm.cuh"
#include "experts/gpu/grouped/sm80/params.cuh"

namespace switchyard {

/// The shapes of kSm80 and kSm80Flat, and the shared memory of a block that the first one takes.
using Sm80Deep = Sm80Shape<64, 3>;
using Sm80Flat = Sm80Shape<32, 4>;
inline constexpr int kSm80DeepBytes = Sm80Deep::kSharedBytes + static_cast<int>(sizeof(Sm80Walk));

template <typename T, Epilogue kEpilogue, typename Shape>
void launch_sm80_shape(const GroupedProduct& product, cudaStream_t stream) {
  constexpr bool kGated = is_gated(kEpilogue);
  constexpr int kOutColumns = kGated ? Shape::kTileN / 2 : Shape::kTileN;
  const Sm80Params params = sm80_params(product, kGated, kOutColumns);
  const auto kernel = grouped_gemm_sm80<T, kEpilogue, Shape>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  kernel<<<static_cast<unsigned>(product.num_sms), Shape::kThreads, Shape::kSharedBytes, stream>>>(
      params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

/// Deep stages where a block can have the shared memory for them (sm_80, sm_90, but not sm_86):
/// 1 to 6% faster than flat ones.
template <typename T, Epilogue kEpilogue>
void launch_sm80_kernel(const GroupedProduct& product, cudaStream_t stream) {
  if (product.layer.path != GroupedPath::kSm80Flat && has_room_for_sm80()) {
    launch_sm80_shape<T, kEpilogue, Sm80Deep>(product, stream);
  } else {
    launch_sm80_shape<T, kEpilogue, Sm80Flat>(product, stream);
  }
}

/// Both compute types.
template <Epilogue kEpilogue>
void launch_sm80_types(const GroupedProduct& product, cudaStream_t stream) {
  if (product.layer.dtype == DType::kBF16) {
    launch_sm80_kernel<__nv_bfloat16, kEpilogue>(product, stream);
  } else {
    launch_sm80_kernel<__half, kEpilogue>(product, stream);
  }
}

}  // namespace switchyard
