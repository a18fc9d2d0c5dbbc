// Codes as rows of bf16. Bound by the memory that the rows are written to: a warp has a unit, and
// each lane writes 16 bytes of a row at a time.

#include <cuda_bf16.h>

#include <algorithm>

#include "core/gpu/cuda_check.hpp"
#include "experts/gpu/coded/expand.hpp"
#include "experts/gpu/coded/layout.hpp"

namespace switchyard::coded {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// A pair of numbers that are too small, raised (exact) and then scaled: rounded once.
__device__ __forceinline__ std::uint32_t raised(std::uint32_t pair, float raise, float scale) {
  const float low = __uint_as_float(pair << 16) * raise;
  const float high = __uint_as_float(pair & 0xffff0000U) * raise;
  union {
    __nv_bfloat162 numbers;
    std::uint32_t bits;
  } out;
  out.numbers = __floats2bfloat162_rn(low * scale, high * scale);
  return out.bits;
}

__global__ void __launch_bounds__(kThreads) expand_mxfp4_kernel(const ExpandParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t across = units_of(p.cols);
  const std::int64_t of_matrix = groups_of(p.num_rows) * across;
  const std::int64_t stride = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
       i < p.matrices * of_matrix; i += stride) {
    const std::int64_t matrix = i / of_matrix;
    const std::int64_t group = (i - matrix * of_matrix) / across;
    const std::int64_t unit = i - matrix * of_matrix - group * across;
    const std::byte* from = p.codes + i * kMxfp4UnitBytes;
    const uint2 words = *reinterpret_cast<const uint2*>(from + 8 * lane);
    const std::uint32_t exponents =
        *reinterpret_cast<const std::uint16_t*>(from + kMxfp4ScalesAt + lane / 4 * 2);
    const float factor = p.scales[matrix];
    auto* to = static_cast<__nv_bfloat16*>(p.rows) +
               (matrix * p.num_rows + group * kGroupRows + lane / 4) * p.cols + unit * kUnitValues +
               lane % 4 * 8;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      if (unit * kUnitValues + step * kStepValues >= p.cols) break;
      const std::uint32_t word = step == 0 ? words.x : words.y;
      const std::uint32_t exponent = step == 0 ? exponents & 255U : exponents >> 8;
      const float raise = __uint_as_float(exponent << 23);
      *reinterpret_cast<uint4*>(to + step * kStepValues) = {
          raised(mxfp4_pair<0>(word), raise, factor), raised(mxfp4_pair<1>(word), raise, factor),
          raised(mxfp4_pair<2>(word), raise, factor), raised(mxfp4_pair<3>(word), raise, factor)};
    }
  }
}

__global__ void __launch_bounds__(kThreads) expand_e4m3_kernel(const ExpandParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t across = units_of(p.cols);
  const std::int64_t of_matrix = groups_of(p.num_rows) * across;
  const std::int64_t blocks_across = (p.cols + kE4M3Block - 1) / kE4M3Block;
  const std::int64_t blocks = block_scales(WeightFormat::kE4M3, p.num_rows, p.cols);
  const std::int64_t stride = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
       i < p.matrices * of_matrix; i += stride) {
    const std::int64_t matrix = i / of_matrix;
    const std::int64_t group = (i - matrix * of_matrix) / across;
    const std::int64_t unit = i - matrix * of_matrix - group * across;
    const std::byte* from = p.codes + i * kE4M3UnitBytes;
    const float scale = p.scales[matrix * blocks + group * kGroupRows / kE4M3Block * blocks_across +
                                 unit * kUnitValues / kE4M3Block];
    auto* to = static_cast<__nv_bfloat16*>(p.rows) +
               (matrix * p.num_rows + group * kGroupRows + lane / 4) * p.cols + unit * kUnitValues +
               lane % 4 * 8;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      if (unit * kUnitValues + step * kStepValues + lane % 4 * 8 >= p.cols) break;
      const uint2 words = *reinterpret_cast<const uint2*>(from + step * kE4M3StepBytes +
                                                          e4m3_place(lane / 4, lane % 4));
      // The number first, then its scale: the product of the code and the scale is rounded once.
      constexpr float kRaise = 0x1p120F;
      const auto two = [&](std::uint32_t word, std::uint32_t selector) {
        return raised(e4m3_pair(__byte_perm(word, 0, selector)), kRaise, scale);
      };
      *reinterpret_cast<uint4*>(to + step * kStepValues) = {
          two(words.x, 0x1404), two(words.x, 0x3424), two(words.y, 0x1404), two(words.y, 0x3424)};
    }
  }
}

}  // namespace

void launch_expand(const ExpandParams& params, cudaStream_t stream) {
  const std::int64_t units = params.matrices * groups_of(params.num_rows) * units_of(params.cols);
  if (units == 0) return;
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>((units + kWarps - 1) / kWarps, 1 << 16));
  if (params.format == WeightFormat::kMxfp4) {
    expand_mxfp4_kernel<<<blocks, kThreads, 0, stream>>>(params);
  } else {
    expand_e4m3_kernel<<<blocks, kThreads, 0, stream>>>(params);
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::coded
