// Codes as rows of bf16. Bound by the memory that the rows are written to: a warp has a unit, or of
// matrices that lie as they are stored 256 columns of a row, and each lane writes 16 bytes of a row
// at a time. blockIdx.y is the matrix.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/ptx.cuh"
#include "experts/gpu/coded/expand.hpp"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/coded/pack.hpp"

namespace switchyard::coded {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLaneColumns = 8;
constexpr int kWarpColumns = 32 * kLaneColumns;
constexpr std::int64_t kMostBlocks = 1024;  // of a matrix: about what a GPU holds at once

/// Whether nobody asks for this block's matrix.
__device__ __forceinline__ bool is_left_out(const ExpandParams& p) {
  return p.expert_rows != nullptr &&
         p.expert_rows[blockIdx.y / static_cast<unsigned>(p.of_expert)] == 0;
}

/// Of a matrix, for this warp; fewer than 2^31.
__device__ __forceinline__ unsigned first_item() { return blockIdx.x * kWarps + threadIdx.x / 32; }
__device__ __forceinline__ unsigned to_next_item() { return gridDim.x * kWarps; }

/// Two neighbours of a row.
__device__ __forceinline__ int rounded(float low, float high) {
  union {
    __nv_bfloat162 numbers;
    int bits;
  } out;
  out.numbers = __floats2bfloat162_rn(low, high);
  return out.bits;
}

/// A pair of numbers that are too small, raised (exact) and then scaled: rounded once.
__device__ __forceinline__ int raised(std::uint32_t pair, float raise, float scale) {
  const float low = __uint_as_float(pair << 16) * raise;
  const float high = __uint_as_float(pair & 0xffff0000U) * raise;
  return rounded(low * scale, high * scale);
}

__global__ void __launch_bounds__(kThreads) expand_mxfp4_kernel(const ExpandParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (is_left_out(p)) return;
  const std::int64_t matrix = blockIdx.y;
  const auto across = static_cast<unsigned>(units_of(p.cols));
  const unsigned of_matrix = static_cast<unsigned>(groups_of(p.num_rows)) * across;
  for (unsigned i = first_item(); i < of_matrix; i += to_next_item()) {
    const std::int64_t group = i / across;
    const std::int64_t unit = i % across;
    const std::byte* from = p.codes + (matrix * of_matrix + i) * kMxfp4UnitBytes;
    const uint2 words = *reinterpret_cast<const uint2*>(from + 8 * lane);
    const auto exponent =
        std::to_integer<std::uint32_t>(from[kMxfp4ScalesAt + lane / 4 * 2 + lane % 4 / 2]);
    const float factor = p.scales[matrix];
    const bool whole = (unit + 1) * kUnitValues <= p.cols;  // as mxfp4_place() has it
    auto* to = static_cast<__nv_bfloat16*>(p.rows) +
               (matrix * p.num_rows + group * kGroupRows + lane / 4) * p.cols + unit * kUnitValues +
               lane % 4 * (whole ? 16 : 8);
    const float raise = __uint_as_float(exponent << 23);
#pragma unroll
    for (int step = 0; step < (whole ? 2 : 1); ++step) {
      const std::uint32_t word = step == 0 ? words.x : words.y;
      ptx::store_global_16(
          to + step * 8,
          {raised(mxfp4_pair<0>(word), raise, factor), raised(mxfp4_pair<1>(word), raise, factor),
           raised(mxfp4_pair<2>(word), raise, factor), raised(mxfp4_pair<3>(word), raise, factor)});
    }
  }
}

__global__ void __launch_bounds__(kThreads) expand_e4m3_kernel(const ExpandParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (is_left_out(p)) return;
  const std::int64_t matrix = blockIdx.y;
  const auto across = static_cast<unsigned>(units_of(p.cols));
  const unsigned of_matrix = static_cast<unsigned>(groups_of(p.num_rows)) * across;
  const std::int64_t blocks_across = (p.cols + kE4M3Block - 1) / kE4M3Block;
  const std::int64_t blocks = block_scales(WeightFormat::kE4M3, p.num_rows, p.cols);
  for (unsigned i = first_item(); i < of_matrix; i += to_next_item()) {
    const std::int64_t group = i / across;
    const std::int64_t unit = i % across;
    const std::byte* from = p.codes + (matrix * of_matrix + i) * kE4M3UnitBytes;
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
      ptx::store_global_16(to + step * kStepValues, {two(words.x, 0x1404), two(words.x, 0x3424),
                                                     two(words.y, 0x1404), two(words.y, 0x3424)});
    }
  }
}

/// How a matrix of two codes a byte lies.
struct AsStored {
  std::int64_t matrix_bytes = 0;
  std::int64_t scales_at = 0;  ///< Behind the values.
  std::int64_t scale_row_bytes = 0;
  int group_shift = 0;  ///< log2 of the values that share a scale.
};

/// What codes of a group of int4 mean.
class Int4Group {
 public:
  /// @param scales  Of the row, at any address.
  __device__ Int4Group(const ExpandParams& p, const std::byte* scales, int group, int groups) {
    const std::uint32_t bits = byte_at(scales, 2 * group) | byte_at(scales, 2 * group + 1) << 8;
    scale_ = p.int4.scale == DType::kF16
                 ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits)))
                 : __uint_as_float(bits << 16);
    std::uint32_t zero = kInt4Zero;
    if (p.int4.zero_points) {
      zero = byte_at(scales, 2 * groups + group / 2) >> (group % 2 * 4) & 15U;
    }
    zero_ = __uint_as_float(kWhole | zero);
  }
  /// The code in the lowest four bits: its difference from the zero point is exact.
  __device__ float number(std::uint32_t code) const {
    return (__uint_as_float(kWhole | (code & 15U)) - zero_) * scale_;
  }

 private:
  static constexpr std::uint32_t kWhole = 0x4b000000U;  // 2^23: its last bits are whole numbers
  static __device__ std::uint32_t byte_at(const std::byte* from, int i) {
    return static_cast<std::uint32_t>(from[i]);
  }
  float scale_, zero_;
};

/// Of NVFP4.
class Nvfp4Group {
 public:
  __device__ Nvfp4Group(const ExpandParams& p, const std::byte* scales, int group, int /*groups*/) {
    const auto bits = static_cast<std::uint32_t>(scales[group]);
    // Sign, exponent and mantissa where f32 has them: 2^120 too small.
    const float scale = __uint_as_float((bits & 0x80U) << 24 | (bits & 0x7fU) << 20) * 0x1p120F;
    scale_ = scale * p.scales[blockIdx.y];
  }
  /// Likewise, 2^126 too small; raised first, which is exact, so that the product is rounded as
  /// decode() rounds it.
  __device__ float number(std::uint32_t code) const {
    const float raised = __uint_as_float((code & 8U) << 28 | (code & 7U) << 22) * 0x1p126F;
    return raised * scale_;
  }

 private:
  float scale_;
};

template <typename Group>
__global__ void __launch_bounds__(kThreads)
    expand_as_stored_kernel(const ExpandParams p, const AsStored lies) {
  if (is_left_out(p)) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::byte* const values = p.codes + blockIdx.y * lies.matrix_bytes;
  const auto across = static_cast<unsigned>((p.cols + kWarpColumns - 1) / kWarpColumns);
  const unsigned of_matrix = static_cast<unsigned>(p.num_rows) * across;
  const int groups = static_cast<int>(p.cols >> lies.group_shift);
  auto* const to = static_cast<__nv_bfloat16*>(p.rows) + blockIdx.y * p.num_rows * p.cols;
  for (unsigned i = first_item(); i < of_matrix; i += to_next_item()) {
    const std::int64_t row = i / across;
    const int column = static_cast<int>(i % across) * kWarpColumns + lane * kLaneColumns;
    if (column >= p.cols) continue;
    const std::int64_t at = row * p.cols + column;
    const auto word = *reinterpret_cast<const std::uint32_t*>(values + at / 2);
    const Group group(p, values + lies.scales_at + row * lies.scale_row_bytes,
                      column >> lies.group_shift, groups);
    const auto two = [&](int shift) {
      return rounded(group.number(word >> shift), group.number(word >> (shift + 4)));
    };
    ptx::store_global_16(to + at, {two(0), two(8), two(16), two(24)});
  }
}

/// Blocks for so many items of a warp in each matrix.
dim3 grid_of(const ExpandParams& p, std::int64_t items) {
  const std::int64_t blocks = std::min((items + kWarps - 1) / kWarps, kMostBlocks);
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(p.matrices)};
}

template <typename Group>
void expand_as_stored(const ExpandParams& p, std::int64_t group, cudaStream_t stream) {
  const StoredLayout layout{.format = p.format, .rows = p.num_rows, .cols = p.cols, .int4 = p.int4};
  const AsStored lies{.matrix_bytes = bytes_of(layout),
                      .scales_at = layout.value_bytes(),
                      .scale_row_bytes = layout.scale_row_bytes(),
                      .group_shift = std::countr_zero(static_cast<std::uint64_t>(group))};
  const std::int64_t items = p.num_rows * ((p.cols + kWarpColumns - 1) / kWarpColumns);
  expand_as_stored_kernel<Group><<<grid_of(p, items), kThreads, 0, stream>>>(p, lies);
}

}  // namespace

void launch_expand(const ExpandParams& params, cudaStream_t stream) {
  if (params.matrices == 0 || params.num_rows == 0 || params.cols == 0) return;
  const dim3 of_units = grid_of(params, groups_of(params.num_rows) * units_of(params.cols));
  switch (params.format) {
    case WeightFormat::kMxfp4:
      expand_mxfp4_kernel<<<of_units, kThreads, 0, stream>>>(params);
      break;
    case WeightFormat::kE4M3: expand_e4m3_kernel<<<of_units, kThreads, 0, stream>>>(params); break;
    case WeightFormat::kInt4: expand_as_stored<Int4Group>(params, params.int4.group, stream); break;
    case WeightFormat::kNvfp4: expand_as_stored<Nvfp4Group>(params, kNvfp4Block, stream); break;
    default:
      fail(ErrorCode::kInvalidArgument, "weights in {} have no codes to expand",
           to_string(params.format));
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::coded
