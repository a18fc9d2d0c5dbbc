// A warp takes a row, 8 values a lane at a time; rows that are not used cost a look at a count.
#include "bench/device_stand_in.hpp"
#include "comm/device_exchange.cuh"
#include "core/cuda_device.hpp"

namespace switchyard::bench {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) stand_in_kernel(const __grid_constant__ StandIn p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  const std::int64_t hidden = p.out.cols;
  std::int64_t limit = p.out.rows;
  if (p.rows != nullptr) limit = min(limit, std::int64_t{*p.rows});
  if (p.rows_64 != nullptr) limit = min(limit, *p.rows_64);
  for (std::int64_t i = (blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / 32; i < limit;
       i += warps) {
    if (p.bucket_rows != nullptr && i % p.capacity >= p.bucket_rows[i / p.capacity]) continue;
    const std::int64_t row = p.x_row == nullptr ? i : p.x_row[i];
    const auto* const from = reinterpret_cast<const T*>(p.x.data) + row * hidden;
    auto* const to = reinterpret_cast<T*>(p.out.data) + i * hidden;
#pragma unroll 4
    for (std::int64_t h = lane * 8; h < hidden; h += 256) {
      const Eight<T> in = *reinterpret_cast<const Eight<T>*>(from + h);
      Eight<T> out;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 value = get_pair(in, pair);
        set_pair(out, pair, {value.x * p.factor, value.y * p.factor});
      }
      *reinterpret_cast<Eight<T>*>(to + h) = out;
    }
  }
}

}  // namespace

void launch_stand_in(const StandIn& params, cudaStream_t stream) {
  if (params.out.rows == 0) return;
  const auto blocks = static_cast<unsigned>(8 * num_multiprocessors());
  switch (params.out.dtype) {
    case DType::kBF16:
      stand_in_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case DType::kF16: stand_in_kernel<__half><<<blocks, kThreads, 0, stream>>>(params); break;
    default: stand_in_kernel<float><<<blocks, kThreads, 0, stream>>>(params);
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::bench
