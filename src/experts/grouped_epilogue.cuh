#pragma once

// The way of the sums from registers to memory: bias and activation in fp32, rounding to 16 bits,
// 64 rows of one warpgroup staged in shared memory, and from there one TMA store for 64 columns. A
// block with fewer rows goes by 16-byte stores instead, so that it never touches its neighbour's
// rows. (64 bulk copies of a row each kept the copy engine so busy that the loads starved: 604
// TFLOP/s instead of over 700 at 2048 products a sum.)

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "experts/activation.cuh"
#include "experts/grouped_schedule.hpp"

namespace switchyard {

/// What the epilogue does to the sums of a tile.
enum class Epilogue : std::uint8_t {
  kGated,   ///< activation(gate, up); the tile's columns are gate ones, then up ones.
  kPlain,   ///< activation(gate).
  kLinear,  ///< Nothing but the bias.
};

template <typename T>
__device__ __forceinline__ std::uint32_t pack_two(float a, float b);
template <>
__device__ __forceinline__ std::uint32_t pack_two<__nv_bfloat16>(float a, float b) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&two);
}
template <>
__device__ __forceinline__ std::uint32_t pack_two<__half>(float a, float b) {
  const __half2 two = __floats2half2_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&two);
}

struct EpilogueParams {
  void* out;             // [S, columns]
  const float* bias;     // [E, columns] or, gated, [E, 2 * columns]; may be null
  std::int32_t columns;  // of out
  ActivationParams activation;
};

/// Turns the sums of a warpgroup (as wgmma leaves them: kColumns / 2 in each thread) into 16-bit
/// pairs, for one tile.
template <typename T, Epilogue kEpilogue, int kColumns>
class Packer {
 public:
  static constexpr bool kGated = kEpilogue == Epilogue::kGated;
  static constexpr int kBlocks = (kGated ? kColumns / 2 : kColumns) / 8;  // of 8 columns of out

  __device__ Packer(const EpilogueParams& params, std::int32_t expert, std::int32_t column)
      : activation_(params.activation), columns_(params.columns) {
    const std::int32_t first = column + static_cast<std::int32_t>(threadIdx.x % 4) * 2;
    columns_left_ = columns_ - first;
    if (params.bias != nullptr) {
      bias_ = params.bias + static_cast<std::int64_t>(expert) * columns_ * (kGated ? 2 : 1) + first;
    }
  }

  /// The two rows of column block `block`.
  template <Activation kKind>
  __device__ __forceinline__ uint2 block(const float (&sums)[kColumns / 2], int block) const {
    const float2 b = bias(0, block);
    const std::uint32_t row0 = pair<kKind>(sums, block, 0, b);
    return {row0, pair<kKind>(sums, block, 1, b)};
  }

  /// body(integral_constant of the activation); the choice costs nothing inside.
  template <typename Body>
  __device__ __forceinline__ void with_kind(Body&& body) const {
    if constexpr (kEpilogue == Epilogue::kLinear) {
      body(std::integral_constant<Activation, Activation::kSilu>{});
    } else {
      with_activation(activation_.kind, body);
    }
  }

 private:
  __device__ __forceinline__ float2 bias(std::int32_t half, int block) const {
    if (bias_ == nullptr || block * 8 >= columns_left_) return {0.0F, 0.0F};
    return __ldg(reinterpret_cast<const float2*>(bias_ + half * columns_ + block * 8));
  }

  template <Activation kKind>
  __device__ __forceinline__ std::uint32_t pair(const float (&sums)[kColumns / 2], int block, int h,
                                                float2 b) const {
    float v0 = sums[4 * block + 2 * h] + b.x;
    float v1 = sums[4 * block + 2 * h + 1] + b.y;
    if constexpr (kGated) {
      const float2 b_up = bias(1, block);
      v0 = activate<kKind, true>(v0, sums[4 * (block + kBlocks) + 2 * h] + b_up.x, activation_);
      v1 = activate<kKind, true>(v1, sums[4 * (block + kBlocks) + 2 * h + 1] + b_up.y, activation_);
    } else if constexpr (kEpilogue == Epilogue::kPlain) {
      v0 = activate<kKind, false>(v0, 0.0F, activation_);
      v1 = activate<kKind, false>(v1, 0.0F, activation_);
    }
    return pack_two<T>(v0, v1);
  }

  ActivationParams activation_;
  std::int32_t columns_;
  std::int32_t columns_left_ = 0;
  const float* bias_ = nullptr;
};

/// Where 64 packed rows of a warpgroup go.
struct RowBlock {
  std::int32_t row = 0;   // in out
  std::int32_t rows = 0;  // 0..64
  std::int32_t column = 0;
};

/// One warpgroup's way out through shared memory: two boxes of 64 rows by 64 (or 32) columns,
/// filled in turn, each swizzled as its tensor map says, which also puts the eight rows of a
/// stmatrix into different banks. A box is filled while the other still leaves.
template <int kBoxColumns_>
struct Staging {
  static constexpr int kBoxColumns = kBoxColumns_;
  static_assert(kBoxColumns == 64 || kBoxColumns == 32);
  static constexpr int kBoxRowBytes = kBoxColumns * 2;
  static constexpr int kBoxBytes = kHalfRows * kBoxRowBytes;
  static constexpr int kBytes = 2 * kBoxBytes;
  static constexpr int kChunks = kBoxColumns / 8;  // of 16 bytes in a row

  std::uint32_t address;
  int barrier;   // the warpgroup's own named barrier
  int turn = 0;  // which box is next

  /// Where 16-byte chunk `chunk` of row `row` lies in a box.
  static __device__ __forceinline__ std::uint32_t place(int row, int chunk) {
    const int plain = row * kBoxRowBytes + chunk * 16;
    return static_cast<std::uint32_t>(plain ^ ((plain >> 7 & (kChunks - 1)) << 4));
  }

  /// Box number `box` of a block of rows leaves for memory, behind this call where there are 64
  /// rows. `packed_pair(i)`: the 16-bit pairs of its column blocks i and i + 1.
  template <typename PackedPair>
  __device__ __forceinline__ void send(int box, const RowBlock& block, const EpilogueParams& params,
                                       const CUtensorMap* out_map, PackedPair&& packed_pair) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const std::uint32_t from = address + static_cast<std::uint32_t>(turn * kBoxBytes);
    turn ^= 1;
    // All but the last box have left; a group was committed for each, even where it was empty.
    if (thread == 0) ptx::bulk_wait_read<1>();
    ptx::named_barrier(barrier, 128);
    const std::uint32_t to = from + place(thread / 32 * 16 + thread % 16, thread / 16 % 2);
#pragma unroll
    for (int i = 0; i < kChunks; i += 2) {
      const uint4 pair = packed_pair(i);
      // The chunk's even part only flips bits: boxes are aligned to their swizzle's period.
      ptx::stmatrix_x4(to ^ static_cast<std::uint32_t>(i << 4), pair.x, pair.y, pair.z, pair.w);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier(barrier, 128);
    const std::int32_t column = block.column + box * kBoxColumns;
    if (block.rows < kHalfRows) copy_rows(from, column, block, params, thread);
    if (thread == 0) {
      if (block.rows == kHalfRows && column < params.columns) {
        ptx::tma_store_2d(out_map, column, block.row, from);
      }
      ptx::bulk_commit();
    }
  }

 private:
  static __device__ __forceinline__ void copy_rows(std::uint32_t from, std::int32_t column,
                                                   const RowBlock& block,
                                                   const EpilogueParams& params, int thread) {
    const std::int32_t left = (params.columns - column) / 8;
    const int chunk = thread % kChunks;
    if (chunk >= left) return;
    for (int row = thread / kChunks; row < block.rows; row += 128 / kChunks) {
      const std::int64_t offset =
          static_cast<std::int64_t>(block.row + row) * params.columns + column + chunk * 8;
      *reinterpret_cast<int4*>(static_cast<char*>(params.out) + offset * 2) =
          ptx::load_shared_16(from + place(row, chunk));
    }
  }
};

}  // namespace switchyard
