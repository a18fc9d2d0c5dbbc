// Rows by lists that the host has made: a warp gathers a row, a thread adds 8 values of a token.
// Bound by memory.
#include "bench/variants/device_host_lists_kernels.hpp"
#include "comm/device/exchange.cuh"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;

unsigned blocks() { return static_cast<unsigned>(8 * num_multiprocessors()); }

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const std::byte* from, const std::int32_t* index, std::byte* to,
                  std::int64_t count, std::int64_t row_bytes) {
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  const std::int64_t lane = threadIdx.x % 32;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; i < count;
       i += warps) {
    const std::byte* const source = from + index[i] * row_bytes;
    std::byte* const target = to + i * row_bytes;
    for (std::int64_t at = lane * 16; at < row_bytes; at += 512) {
      *reinterpret_cast<uint4*>(target + at) = *reinterpret_cast<const uint4*>(source + at);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ WeightedRows p) {
  const std::int64_t vectors = p.out.cols / 8;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.out.rows * vectors;
       i += stride) {
    const std::int64_t token = i / vectors;
    const std::int64_t at = i % vectors * 8;
    float2 sum[4] = {};
    for (int k = 0; k < p.top_k; ++k) {
      const std::int32_t row = p.index[token * p.top_k + k];
      if (row < 0) continue;
      const float weight = p.weight[token * p.top_k + k];
      const auto values = *reinterpret_cast<const Eight<T>*>(reinterpret_cast<const T*>(p.rows) +
                                                             row * p.out.cols + at);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 value = get_pair(values, pair);
        sum[pair] = {__fmaf_rn(weight, value.x, sum[pair].x),
                     __fmaf_rn(weight, value.y, sum[pair].y)};
      }
    }
    Eight<T> out;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) set_pair(out, pair, sum[pair]);
    *reinterpret_cast<Eight<T>*>(reinterpret_cast<T*>(p.out.data) + i * 8) = out;
  }
}

}  // namespace

void gather_rows(const std::byte* from, const std::int32_t* index, std::byte* to,
                 std::int64_t count, std::int64_t row_bytes, cudaStream_t stream) {
  if (count == 0) return;
  gather_kernel<<<blocks(), kThreads, 0, stream>>>(from, index, to, count, row_bytes);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void sum_weighted_rows(const WeightedRows& args, cudaStream_t stream) {
  if (args.out.rows == 0) return;
  switch (args.out.dtype) {
    case DType::kBF16: sum_kernel<__nv_bfloat16><<<blocks(), kThreads, 0, stream>>>(args); break;
    case DType::kF16: sum_kernel<__half><<<blocks(), kThreads, 0, stream>>>(args); break;
    default: sum_kernel<float><<<blocks(), kThreads, 0, stream>>>(args);
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
