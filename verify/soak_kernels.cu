// Small whole numbers for an exchange, what its experts make of them, and the comparison of what
// comes back: made and compared where they lie, so that exchanges follow each other without the
// host. Sizes are tiny: bound by launches.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/gpu/cuda_check.hpp"
#include "core/splitmix64.hpp"
#include "verify/soak_kernels.hpp"
#include "verify/soak_shapes.hpp"

namespace switchyard::verify {
namespace {

constexpr unsigned kBlocks = 8;
constexpr unsigned kThreads = 256;

__device__ __forceinline__ std::uint64_t mixed(std::uint64_t x) {
  return splitmix64_mix(x + kSplitMix64Step);
}

/// Uniform in [low, low + count): number i of a seed.
__device__ __forceinline__ int drawn(std::uint64_t seed, std::int64_t i, int low, int count) {
  return low + static_cast<int>(mixed(seed ^ mixed(static_cast<std::uint64_t>(i))) %
                                static_cast<std::uint64_t>(count));
}

__device__ __forceinline__ float load(const void* values, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kBF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[i]);
    case DType::kF16: return __half2float(static_cast<const __half*>(values)[i]);
    default: return static_cast<const float*>(values)[i];
  }
}

__device__ __forceinline__ void store(void* values, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::kBF16: static_cast<__nv_bfloat16*>(values)[i] = __float2bfloat16(value); break;
    case DType::kF16: static_cast<__half*>(values)[i] = __float2half(value); break;
    default: static_cast<float*>(values)[i] = value;
  }
}

__device__ __forceinline__ std::int64_t first_of_thread() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ std::int64_t all_threads() {
  return std::int64_t{gridDim.x} * blockDim.x;
}

/// What a row's experts of this list make of it, over it.
__device__ __forceinline__ float factor_of_row(const std::int32_t* expert, const float* weight,
                                               int top_k) {
  float factor = 0;
  for (int k = 0; k < top_k; ++k) {
    if (expert[k] >= 0) factor += weight[k] * factor_of(expert[k]);
  }
  return factor;
}

__global__ void tokens_kernel(const __grid_constant__ SoakExchange e) {
  for (std::int64_t i = first_of_thread(); i < e.num_tokens * e.hidden; i += all_threads()) {
    store(e.x, e.dtype, i, static_cast<float>(drawn(e.seed, i, -4, 9)));
    e.out[i] = -1.0F;
  }
  for (std::int64_t i = first_of_thread(); i < e.num_tokens * e.top_k; i += all_threads()) {
    e.expert[i] = drawn(e.seed + 1, i, -1, e.num_experts + 1);
    e.weight[i] = static_cast<float>(drawn(e.seed + 2, i, 1, 2));
  }
}

__global__ void partials_kernel(const __grid_constant__ SoakExchange e,
                                const __grid_constant__ DeviceReceived received) {
  for (std::int64_t i = first_of_thread(); i < received.x.rows * e.hidden; i += all_threads()) {
    const std::int64_t row = i / e.hidden;
    const float factor = factor_of_row(received.expert.data + row * e.top_k,
                                       received.weight.data + row * e.top_k, e.top_k);
    if (factor != 0) {
      store(e.partials, e.partial_type, i, factor * load(received.x.data, e.dtype, i));
    }
  }
}

__global__ void check_kernel(const __grid_constant__ SoakExchange e) {
  unsigned long long checksum = 0;
  for (std::int64_t i = first_of_thread(); i < e.num_tokens * e.hidden; i += all_threads()) {
    const std::int64_t token = i / e.hidden;
    const float factor =
        factor_of_row(e.expert + token * e.top_k, e.weight + token * e.top_k, e.top_k);
    const float out = e.out[i];
    checksum += mixed(e.seed + static_cast<std::uint64_t>(i)) * __float_as_uint(out);
    if (out == factor * load(e.x, e.dtype, i)) continue;
    atomicAdd(&e.status->wrong, 1ULL);
    atomicMin(&e.status->first,
              static_cast<unsigned long long>(e.index << 32) | static_cast<unsigned>(i));
  }
  if (checksum != 0) atomicAdd(&e.status->checksum, checksum);
}

}  // namespace

void launch_soak_tokens(const SoakExchange& exchange, cudaStream_t stream) {
  tokens_kernel<<<kBlocks, kThreads, 0, stream>>>(exchange);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void launch_soak_partials(const SoakExchange& exchange, const DeviceReceived& received,
                          cudaStream_t stream) {
  partials_kernel<<<kBlocks, kThreads, 0, stream>>>(exchange, received);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void launch_soak_check(const SoakExchange& exchange, cudaStream_t stream) {
  check_kernel<<<kBlocks, kThreads, 0, stream>>>(exchange);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::verify
