#pragma once

// How a tile's sums leave on the way back on Hopper. Mostly they are rounded to 16 bits and handed
// to warps that only store: epilogues that read and write memory then cost the tensor cores
// no more than the rounding. What must stay in fp32 (parts of a gradient, sums that are added to)
// the multiplying warps bring out themselves, box by box.

#include "experts/gpu/backward/sm90/pipeline.cuh"

namespace switchyard::backward::sm90 {

/// Where 16-byte chunk `chunk` of a row of the handed tile lies: 128 rows of 256 values; kTurned:
/// 256 rows of 128, the transpose. Eight rows' chunks lie in different banks.
template <bool kTurned>
__device__ __forceinline__ std::uint32_t tile_place(int row, int chunk) {
  return static_cast<std::uint32_t>(row * (kTurned ? 2 * kTileM : 2 * kTileN) +
                                    ((chunk ^ row % 8) << 4));
}

/// A side's view of the one tile between the warpgroups: one multiplies and puts it, the other
/// stores it.
template <typename Context>
class HandOver {
 public:
  explicit __device__ HandOver(const Context& context) : context_(context) {}

  /// Multiplying: until the tile put last is stored and its place is free.
  __device__ __forceinline__ void wait_stored() const {
    ptx::mbarrier_wait(context_.tile_stored(), (count_ & 1) ^ 1);
  }
  /// A multiplying warp: its 16 rows of a unit's sums.
  template <typename T, bool kTurned>
  __device__ __forceinline__ void put(const float (&sums)[kTileN / 2]) {
    wait_stored();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = context_.multiply_warp();
#pragma unroll
    for (int block = 0; block < kTileN / 8; block += 2) {
      // Four matrices of 8 x 8: the upper and lower rows of two blocks of eight columns.
      std::uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = pack_pair(sums[4 * block + 2 * i], sums[4 * block + 2 * i + 1], T{});
      }
      if constexpr (kTurned) {
        const std::uint32_t to =
            tile_place<true>((block + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2);
        ptx::stmatrix_x4_transposed(context_.tile() + to, pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
        const std::uint32_t to =
            tile_place<false>(warp * 16 + lane / 8 % 2 * 8 + lane % 8, block + lane / 16);
        ptx::stmatrix_x4(context_.tile() + to, pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(context_.tile_put());
    ++count_;
  }

  /// Storing: until the next tile is there.
  __device__ __forceinline__ void wait_put() const {
    ptx::mbarrier_wait(context_.tile_put(), count_ & 1);
  }
  template <bool kTurned>
  [[nodiscard]] __device__ __forceinline__ int4 get(int row, int chunk) const {
    return ptx::load_shared_16(context_.tile() + tile_place<kTurned>(row, chunk));
  }
  /// A storing warp: it has read the tile.
  __device__ __forceinline__ void stored() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(context_.tile_stored());
    ++count_;
  }

 private:
  const Context& context_;
  std::uint32_t count_ = 0;  ///< Tiles handed over so far.
};

/// A storing warp: `store(unit)` for each.
template <typename Context, typename Store>
__device__ __forceinline__ void run_store(const Context& context, Store&& store) {
  for (std::uint32_t index = 0;; ++index) {
    const int4 unit = context.receive(index);
    if (unit.x < 0) return;
    store(unit);
  }
}

/// A multiplying warp's part of a unit's sums, 16 rows, in four boxes of 64 columns, in fp32. They
/// pass through the place of the handed tile: wait_stored() before, all_out() behind the last.
class OutBoxes {
 public:
  static constexpr int kTurns = 4;  ///< Each of four rows; a lane has eight columns of one.

  /// `warp`: which of the multiplying ones.
  __device__ OutBoxes(char* shared, int warp) {
    out_ = reinterpret_cast<float*>(shared + kTileAt + warp * kBytes);
    lane_ = static_cast<int>(threadIdx.x) % 32;
    first_row_ = warp * 16;
  }

  /// Row of the tile that this lane has in a turn, and its first column of a box.
  [[nodiscard]] __device__ __forceinline__ int row(int turn) const {
    return first_row_ + turn * 4 + lane_ / 8;
  }
  [[nodiscard]] __device__ __forceinline__ int column() const { return lane_ % 8 * 8; }

  /// The same where a gradient is stored as its transpose: eight rows of one column.
  [[nodiscard]] __device__ __forceinline__ int turned_row() const {
    return first_row_ + lane_ % 2 * 8;
  }
  [[nodiscard]] __device__ __forceinline__ int turned_column(int turn) const {
    return turn * 16 + lane_ / 2;
  }
  __device__ __forceinline__ void get_turned(int turn, float (&values)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = out_[(lane_ % 2 * 8 + i) * kStride + turned_column(turn)];
    }
  }

  /// Box `box` to shared memory, for the lanes of this warp.
  __device__ __forceinline__ void put(const float (&sums)[kTileN / 2], int box) const {
    __syncwarp();
    switch (box) {
      case 0: put_box<0>(sums); break;
      case 1: put_box<1>(sums); break;
      case 2: put_box<2>(sums); break;
      default: put_box<3>(sums); break;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void get(int turn, float (&values)[8]) const {
    const float* const from = out_ + (turn * 4 + lane_ / 8) * kStride + column();
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const auto four = *reinterpret_cast<const float4*>(from + i);
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }
  /// All multiplying warps: none puts a tile where another still reads its box.
  static __device__ __forceinline__ void all_out() { ptx::named_barrier(1, kMultiplyThreads); }

 private:
  static constexpr int kStride = 68;
  static constexpr int kBytes = 16 * kStride * 4;
  static_assert(kMultiplyThreads / 32 * kBytes <= kTileBytes);

  template <int kBox>
  __device__ __forceinline__ void put_box(const float (&sums)[kTileN / 2]) const {
#pragma unroll
    for (int block = 0; block < 8; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int from = (kBox * 8 + block) * 4 + 2 * h;
        float* const to = out_ + (lane_ / 4 + 8 * h) * kStride + block * 8 + lane_ % 4 * 2;
        *reinterpret_cast<float2*>(to) = {sums[from], sums[from + 1]};
      }
    }
  }

  float* out_;
  int lane_;
  int first_row_;
};

}  // namespace switchyard::backward::sm90
