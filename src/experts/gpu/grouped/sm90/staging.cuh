#pragma once

// From 16-bit values in the registers of a warpgroup to rows in memory, through shared memory: as
// boxes of 64 rows by TMA, or warp by warp with 16-byte stores. A block with fewer than 64 rows
// never touches its neighbour's. (A bulk copy for each row kept the copy engine so busy that the
// loads starved: 604 TFLOP/s instead of over 700 where a sum has 2048 products.)

#include "core/gpu/ptx.cuh"
#include "core/gpu/swizzle.hpp"
#include "experts/gpu/grouped/epilogue.cuh"
#include "experts/gpu/grouped/schedule.hpp"
#include "experts/gpu/grouped/sm90/tall.cuh"

namespace switchyard {

/// One warpgroup's way out through shared memory: two boxes of 64 rows by 64 (or 32) columns,
/// filled in turn, each swizzled as its tensor map says, which also puts the eight rows of a
/// stmatrix into different banks. A box is filled while the other still leaves.
template <int kBoxColumns_>
struct BoxStaging {
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
    return swizzled_place<kBoxRowBytes>(row, chunk);
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

/// Rows of 16-bit values in memory.
struct OutRows {
  void* out;
  std::int32_t columns;  // that are written
  std::int32_t stride;   // of all columns
};
__device__ __forceinline__ std::int32_t stride_of(const OutRows& rows) { return rows.stride; }
__device__ __forceinline__ std::int32_t stride_of(const EpilogueParams& params) {
  return params.columns;
}

/// One warp's way out through shared memory, with nobody to wait for: 16 rows by 64 (or 32) columns
/// turn from wgmma's order into rows and leave as 16-byte stores, 128 (or 64) bytes a row.
template <int kBoxColumns_>
struct WarpStaging {
  static constexpr int kBoxColumns = kBoxColumns_;
  static_assert(kBoxColumns == 64 || kBoxColumns == 32);
  static constexpr int kBoxRowBytes = kBoxColumns * 2;
  static constexpr int kBytes = kHalfRows * kBoxRowBytes;  // of the four warps of a warpgroup
  static constexpr int kChunks = kBoxColumns / 8;          // of 16 bytes in a row

  std::uint32_t address;
  int barrier;  // not used: no other warp takes part

  static __device__ __forceinline__ std::uint32_t place(int row, int chunk) {
    return swizzled_place<kBoxRowBytes>(row, chunk);
  }

  /// `rows`: EpilogueParams or OutRows.
  template <typename Rows, typename PackedPair>
  __device__ __forceinline__ void send(int box, const RowBlock& block, const Rows& rows,
                                       const CUtensorMap*, PackedPair&& packed_pair) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first_row = static_cast<int>(threadIdx.x % 128 / 32) * 16;
    const std::uint32_t to = address + place(first_row + lane % 16, lane / 16);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChunks; i += 2) {
      const uint4 pair = packed_pair(i);
      ptx::stmatrix_x4(to ^ static_cast<std::uint32_t>(i << 4), pair.x, pair.y, pair.z, pair.w);
    }
    __syncwarp();
    constexpr int kRowsAtOnce = 32 / kChunks;
    const int chunk = lane % kChunks;
    const int row = first_row + lane / kChunks;
    const std::int32_t column = block.column + box * kBoxColumns + chunk * 8;
    if (column >= rows.columns) return;
    char* out = static_cast<char*>(rows.out) +
                (static_cast<std::int64_t>(block.row + row) * stride_of(rows) + column) * 2;
    const std::int64_t stride = std::int64_t{kRowsAtOnce} * stride_of(rows) * 2;
#pragma unroll
    for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
      const int4 v = ptx::load_shared_16(address + place(row + i * kRowsAtOnce, chunk));
      if (row + i * kRowsAtOnce < block.rows) *reinterpret_cast<int4*>(out + i * stride) = v;
    }
  }
};

/// Boxes where the output is wide (second product: 618 against 578 TFLOP/s on Qwen3-30B), warp by
/// warp where half of the columns fold into the others (first product: 697 against 683 at I = 256).
template <Epilogue kEpilogue, int kBoxColumns>
struct StagingOf {
  static constexpr bool kByBox = kEpilogue == Epilogue::kLinear;
  using Type = std::conditional_t<kByBox, BoxStaging<kBoxColumns>, WarpStaging<kBoxColumns>>;
};

}  // namespace switchyard
