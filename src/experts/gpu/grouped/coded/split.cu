#include "experts/gpu/grouped/coded/split.hpp"

#include <cuda_fp8.h>

#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"
#include "experts/gpu/coded/layout.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 128;

/// A row's scale: its largest value becomes 128 to 256 by `shrink`, which is a power of two.
struct RowScale {
  float shrink;
  float scale;  // 1 / shrink; infinite: the row has an infinite value

  /// @param largest  The bits of the row's largest magnitude, bf16.
  explicit __device__ __forceinline__ RowScale(std::uint32_t largest) {
    // Below 2^-119 a value times the largest power of two that there is still has all its bits.
    const std::uint32_t exponent = max(largest >> 7, 8U);
    shrink = __uint_as_float((261 - exponent) << 23);
    scale = __uint_as_float(exponent == 255 ? 0x7f800000U : (exponent - 7) << 23);
  }
  __device__ __forceinline__ float operator()(float value) const {
    if (scale < HUGE_VALF) return value * shrink;
    return isinf(value) ? copysignf(1, value) : value * 0;
  }
};

/// Four values as numbers of e4m3, and what is left of them.
__device__ __forceinline__ std::uint32_t nearest(float (&values)[4]) {
  std::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const __nv_fp8x2_storage_t pair =
        __nv_cvt_float2_to_fp8x2(make_float2(values[i], values[i + 1]), __NV_SATFINITE, __NV_E4M3);
    const float2 back = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
    values[i] -= back.x;
    values[i + 1] -= back.y;
    codes |= std::uint32_t{pair} << (8 * i);
  }
  return codes;
}

/// A block takes a row in turn. A thread has runs of 8 values; the 16 of 128 values write side
/// by side what all of them have read before, so that a row may be split where it lies.
__global__ void __launch_bounds__(kThreads) split_rows(SplitRows p) {
  __shared__ std::uint32_t largest_of_warp[2][kThreads / 32];
  // There is room for all blocks at once: no block of the product behind them keeps one out.
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  const auto thread = static_cast<int>(threadIdx.x);
  const int runs = static_cast<int>(p.columns / 8);
  const auto rows = static_cast<int>(min(p.max_rows, std::int64_t{__ldg(p.end)}));
  int turn = 0;
  for (int row = static_cast<int>(blockIdx.x); row < rows; row += static_cast<int>(gridDim.x)) {
    const std::int64_t token = p.row_token == nullptr ? row : __ldg(p.row_token + row);
    if (token < 0 || token >= p.num_tokens) continue;
    const uint4* const from = static_cast<const uint4*>(p.x) + token * runs;
    auto* const to = static_cast<std::uint32_t*>(p.out) + std::int64_t{row} * runs * 4;
    std::uint32_t largest = 0;  // in both halves
    for (int run = thread; run < runs; run += kThreads) {
      const uint4 v = from[run];
      const std::uint32_t upper = __vmaxu2(v.x & 0x7fff7fffU, v.y & 0x7fff7fffU);
      largest = __vmaxu2(largest, __vmaxu2(upper, __vmaxu2(v.z & 0x7fff7fffU, v.w & 0x7fff7fffU)));
    }
    largest = __reduce_max_sync(~0U, max(largest & 0xffffU, largest >> 16));
    if (thread % 32 == 0) largest_of_warp[turn][thread / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) largest = max(largest, largest_of_warp[turn][w]);
    turn ^= 1;
    const RowScale scaled(largest);
    if (thread == 0) p.scales[row] = scaled.scale;
    for (int first = 0; first < runs; first += kThreads) {
      const int run = first + thread;
      uint4 v{};
      if (run < runs) v = from[run];
      __syncwarp();
      if (run >= runs) continue;
      float values[2][4];  // of even columns, of odd ones
      const std::uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[0][i] = scaled(__uint_as_float(pairs[i] << 16));
        values[1][i] = scaled(__uint_as_float(pairs[i] & 0xffff0000U));
      }
      const std::int64_t column = std::int64_t{8} * run;
      std::uint32_t* const at = to + coded::split_byte(p.columns, column) / 4;
      std::uint32_t* const second = at + coded::to_second_byte(p.columns, column) / 4;
      at[0] = nearest(values[0]);
      at[4] = nearest(values[1]);
      second[0] = nearest(values[0]);
      second[4] = nearest(values[1]);
    }
  }
}

}  // namespace

void launch_split_rows(const SplitRows& rows, cudaStream_t stream) {
  require(rows.columns % coded::kOrderedValues == 0, "columns={} is not a multiple of {}",
          rows.columns, coded::kOrderedValues);
  if (rows.max_rows == 0 || rows.columns == 0) return;
  const std::int64_t most = 16 * std::int64_t{device_attribute(cudaDevAttrMultiProcessorCount)};
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(most, rows.max_rows)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = rows.overlaps ? 1 : 0;
  SWITCHYARD_CUDA(cudaLaunchKernelEx(&config, split_rows, rows));
}

}  // namespace switchyard
