#pragma once

// Products of few rows in a kernel that stays: a warp streams rows of weights, of which it asks for
// the next piece before it uses the one it has, and reads the block's rows from shared memory.

#include "core/gpu/ptx.cuh"
#include "models/gpu/generation/mma_block.cuh"
#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {

inline constexpr int kStepWarps = 16;
inline constexpr int kStepThreads = 32 * kStepWarps;
inline constexpr int kPieceLoads = 4;         ///< Loads of a lane for each row of weights.
inline constexpr int kRowsOfStep = kFewRows;  ///< What products of several rows are made for.

/// Of a grid: which warp this is, so that neighbouring ones are on different multiprocessors.
__device__ __forceinline__ int warp_of_grid() {
  return static_cast<int>(threadIdx.x / 32 * gridDim.x + blockIdx.x);
}
__device__ __forceinline__ int warps_of_grid() { return static_cast<int>(gridDim.x) * kStepWarps; }

/// What of `all` outputs is this block's: neighbouring ones.
struct OwnOutputs {
  int first, count;

  __device__ __forceinline__ explicit OwnOutputs(int all) {
    const int each = (all + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    first = min(all, static_cast<int>(blockIdx.x) * each);
    count = min(each, all - first);
  }
};

/// A lane's part of up to kPieceLoads * 32 * 16 bytes of each of kRows rows of weights.
template <int kRows>
struct WeightPiece {
  int4 w[kRows][kPieceLoads];

  /// Of a row of `packs` 16 bytes, from pack `first` on; where `there` does not hold, zeros.
  __device__ __forceinline__ void load(int row, const int4* from, int first, int packs,
                                       bool there) {
#pragma unroll
    for (int i = 0; i < kPieceLoads; ++i) {
      const int at = first + 32 * i + static_cast<int>(threadIdx.x) % 32;
      w[row][i] = {};
      if (there && at < packs) w[row][i] = ptx::load_constant_16(from + at);
    }
  }
};
/// Packs of 16 bytes that a piece has of a row.
inline constexpr int kPiecePacks = 32 * kPieceLoads;

/// Adds to sum[m * kCount + r] the piece's row m times row r of `rows`, r < kCount, which begins at
/// pack row_at(r).
template <typename T, int kRows, int kCount, class RowAt>
__device__ __forceinline__ void add_products(const WeightPiece<kRows>& piece, const int4* rows,
                                             int first, int packs, const RowAt& row_at,
                                             float (&sum)[kRows * kCount]) {
#pragma unroll
  for (int i = 0; i < kPieceLoads; ++i) {
    const int at = first + 32 * i + static_cast<int>(threadIdx.x) % 32;
    if (at >= packs) continue;
    float a[kRows][kPack<T>];
#pragma unroll
    for (int m = 0; m < kRows; ++m) unpack16(piece.w[m][i], a[m], T{});
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      float b[kPack<T>];
      unpack16(rows[row_at(r) + at], b, T{});
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) {
          sum[m * kCount + r] = fmaf(a[m][j], b[j], sum[m * kCount + r]);
        }
      }
    }
  }
}

/// Sums over a warp of kCount values each, a power of two of at most 32: lane l has that of value
/// l / (32 / kCount). Each by the same tree as warp_sum().
template <int kCount>
__device__ __forceinline__ float sums_of_warp(float (&v)[kCount]) {
  int offset = 16;
#pragma unroll
  for (int count = kCount; count > 1; count /= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(offset)) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= count / 2) continue;
      const float keep = upper ? v[i + count / 2] : v[i];
      const float give = upper ? v[i] : v[i + count / 2];
      v[i] = keep + __shfl_xor_sync(0xffffffffU, give, offset);
    }
    offset /= 2;
  }
  for (; offset > 0; offset /= 2) v[0] += __shfl_xor_sync(0xffffffffU, v[0], offset);
  return v[0];
}

/// A product with the rows of w [out, in], dealt to the warps of the grid. begin() is what can be
/// done before the rows are there.
template <typename T, int kRows>
class RowProduct {
 public:
  /// @param num_rows  At most kRows: of what is multiplied.
  __device__ RowProduct(const void* w, int in, int out, int num_rows)
      : w_(static_cast<const int4*>(w)),
        packs_(in / kPack<T>),
        out_(out),
        num_rows_(num_rows),
        row_(warp_of_grid()) {}

  /// @param add  (row, out) -> float: what is added to the sum.
  template <class Add>
  __device__ __forceinline__ void begin(const Add& add) {
    load(row_, 0, piece_);
    added_ = lane_writes(row_) ? add(lane_row(), row_) : 0.0F;
  }

  /// @param put  (row, out, float), by one lane for each. `rows`: [kRows, in] in shared memory,
  /// padded_packs() apart, zeros behind num_rows.
  template <class Add, class Put>
  __device__ __forceinline__ void run(const T* rows, const Add& add, const Put& put) {
    const int4* const packs = reinterpret_cast<const int4*>(rows);
#pragma unroll 1
    while (row_ < out_) {
      float sum[kRows] = {};
      const int next_row = row_ + warps_of_grid();
      float added = 0;
#pragma unroll 1
      for (int first = 0; first < packs_; first += kPiecePacks) {
        const bool last = first + kPiecePacks >= packs_;
        WeightPiece<1> next;
        load(last ? next_row : row_, last ? 0 : first + kPiecePacks, next);
        if (last && lane_writes(next_row)) added = add(lane_row(), next_row);
        add_products<T, 1, kRows>(
            piece_, packs, first, packs_, [&](int r) { return r * padded_packs(packs_); }, sum);
        piece_ = next;
      }
      const float total = sums_of_warp(sum);
      if (lane_writes(row_)) put(lane_row(), row_, total + added_);
      added_ = added;
      row_ = next_row;
    }
  }

 private:
  static constexpr int kLanes = 32 / kRows;  ///< That have a row's sum.
  [[nodiscard]] static __device__ __forceinline__ int lane_row() {
    return static_cast<int>(threadIdx.x) % 32 / kLanes;
  }
  [[nodiscard]] __device__ __forceinline__ bool lane_writes(int row) const {
    return row < out_ && threadIdx.x % kLanes == 0 && lane_row() < num_rows_;
  }
  __device__ __forceinline__ void load(int row, int first, WeightPiece<1>& to) const {
    to.load(0, w_ + std::int64_t{row} * packs_, first, packs_, row < out_);
  }

  const int4* w_;
  int packs_, out_, num_rows_, row_;
  float added_ = 0;
  WeightPiece<1> piece_;
};

}  // namespace switchyard::models::gpu
