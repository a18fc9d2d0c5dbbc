// A warp takes 1024 values of a row; rows that are not used cost a look at a count.
#include "bench/exchange/device_stand_in.hpp"
#include "comm/device/exchange.cuh"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"

namespace switchyard::bench {
namespace {

constexpr int kThreads = 512;

constexpr int kSteps = 4;  // vectors of 8 values a lane, all asked for at once
constexpr int kPiece = kSteps * 256;

template <typename T>
__device__ __forceinline__ void scale_piece(const T* from, T* to, int size, float factor) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Eight<T> in[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = step * 256 + lane * 8;
    if (at < size) in[step] = *reinterpret_cast<const Eight<T>*>(from + at);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = step * 256 + lane * 8;
    if (at >= size) continue;
    Eight<T> out;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float2 value = get_pair(in[step], pair);
      set_pair(out, pair, {value.x * factor, value.y * factor});
    }
    *reinterpret_cast<Eight<T>*>(to + at) = out;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) stand_in_kernel(const __grid_constant__ StandIn p) {
  const std::int64_t hidden = p.out.cols;
  const auto pieces = static_cast<int>((hidden + kPiece - 1) / kPiece);
  const int shares = p.bucket_rows == nullptr ? pieces : 1;  // warps that take a row
  ptx::start_after_previous_kernel();
  std::int64_t limit = p.out.rows;
  if (p.rows != nullptr) limit = min(limit, std::int64_t{*p.rows});
  if (p.rows_64 != nullptr) limit = min(limit, *p.rows_64);
  const auto warps = static_cast<int>(gridDim.x) * (kThreads / 32);
  for (int item = static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32));
       item < static_cast<int>(limit) * shares; item += warps) {
    const int i = item / shares;
    if (p.bucket_rows != nullptr && i % p.capacity >= p.bucket_rows[i / p.capacity]) continue;
    const std::int64_t row = p.x_row == nullptr ? i : p.x_row[i];
    const auto* const from = reinterpret_cast<const T*>(p.x.data) + row * hidden;
    auto* const to = reinterpret_cast<T*>(p.out.data) + i * hidden;
    for (std::int64_t at = std::int64_t{item % shares} * kPiece; at < hidden;
         at += std::int64_t{shares} * kPiece) {
      scale_piece(from + at, to + at, static_cast<int>(hidden - at), p.factor);
    }
  }
}

}  // namespace

void launch_stand_in(const StandIn& params, cudaStream_t stream) {
  if (params.out.rows == 0) return;
  // Buckets are mostly empty: many warps look.
  const int waves = params.bucket_rows == nullptr ? 2 : 8;
  const dim3 blocks(static_cast<unsigned>(waves * num_multiprocessors()));
  switch (params.out.dtype) {
    case DType::kBF16:
      launch_overlapped(stand_in_kernel<__nv_bfloat16>, blocks, kThreads, 0, stream, params);
      break;
    case DType::kF16:
      launch_overlapped(stand_in_kernel<__half>, blocks, kThreads, 0, stream, params);
      break;
    default: launch_overlapped(stand_in_kernel<float>, blocks, kThreads, 0, stream, params);
  }
}

}  // namespace switchyard::bench
