#pragma once

// Grouped GEMM with mma.sync and cp.async, for sm_80 and everything later; the schedule, the order
// of sums and the epilogues are those of the Hopper kernel.
//
// Bound by the tensor cores and, close behind, by shared memory. One CTA of 8 warps takes tiles of
// 128 rows by 256 rows of weights, 64 x 64 a warp: 32 columns of each half, so that a gate and its
// up value meet in one thread. In each group of 16 values of k a warp multiplies what it has in
// registers, reads the operands of the next group, and asks for its share of a later stage; the
// CTA meets once a stage. Three stages of 64 values where a CTA may have 144 KB of shared memory,
// four of 32 elsewhere.

#include "experts/gpu/grouped/sm80/load.cuh"
#include "experts/gpu/grouped/sm80/store.cuh"

namespace switchyard {

/// What one warp multiplies in a group of 16 values of k. Rows and columns are dealt out so that a
/// thread gets eight neighbouring columns, 16 bytes of the output: each 8 rows of an operand are
/// two neighbours in each of four blocks of eight, row r of them being 8 (r / 2) + r % 2, and
/// consecutive ones of the same 32 two rows further.
struct Sm80Operands {
  std::uint32_t rows[4][4];     // m16 blocks
  std::uint32_t weights[4][4];  // pairs of n8 blocks
};

/// Read `i` of the eight that bring a group's operands, in the order in which they are needed.
/// `rows`, `weights`: where this lane's row of the first block is.
template <typename Shape>
__device__ __forceinline__ void read_operand(Sm80Operands& operands, int i, std::uint32_t rows,
                                             std::uint32_t weights) {
  constexpr int kFirstWeights = 4;
  constexpr int kOrder[8] = {kFirstWeights, 0, 5, 6, 7, 1, 2, 3};
  const int block = kOrder[i] % 4;
  const bool of_rows = kOrder[i] < kFirstWeights;
  const int row = block % 2 * 4 + block / 2 * (of_rows ? 32 : Shape::kTileN / 2);
  ptx::ldmatrix_x4(of_rows ? operands.rows[block] : operands.weights[block],
                   (of_rows ? rows : weights) + static_cast<std::uint32_t>(row * Shape::kRowBytes));
}

/// The 32 products of a group. Between them go the reads of the next group's operands, then
/// `copy(i)` for each of the group's copies, one after every two products: neither the tensor cores
/// nor shared memory wait. Rows of products run there and back, so that each shares an operand with
/// the one before it.
template <typename T, typename Shape, typename Copy>
__device__ __forceinline__ void multiply(Sm80Sums& sums, const Sm80Operands& with,
                                         Sm80Operands& next, std::uint32_t next_rows,
                                         std::uint32_t next_weights, Copy&& copy) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i % 2 == 0) {
      const int turn = i / 2;
      if (turn < 8) read_operand<Shape>(next, turn, next_rows, next_weights);
      if (turn >= 8 && turn < 8 + Shape::kCopiesPerGroup) copy(turn - 8);
    }
    const int m = i / 8;
    const int n = m % 2 == 0 ? i % 8 : 7 - i % 8;
    const std::uint32_t b0 = with.weights[n / 2][n % 2 * 2];
    const std::uint32_t b1 = with.weights[n / 2][n % 2 * 2 + 1];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      ptx::mma_bf16(sums[m][n], with.rows[m], b0, b1);
    } else {
      ptx::mma_f16(sums[m][n], with.rows[m], b0, b1);
    }
  }
}

template <typename T, Epilogue kEpilogue, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    grouped_gemm_sm80(const __grid_constant__ Sm80Params params) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Sm80Walk walk;
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t end = base + Shape::kSharedBytes;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp_m = static_cast<int>(threadIdx.x / 32 % 2);
  const int warp_n = static_cast<int>(threadIdx.x / 64);
  const int num_steps = (params.depth + Shape::kTileK - 1) / Shape::kTileK;
  if (threadIdx.x < 32) walk.begin(params.schedule);
  __syncthreads();
  Sm80Loader<Shape, is_gated(kEpilogue)> loader(params, walk.ring, num_steps);
  std::uint32_t free = base;
#pragma unroll 1
  for (int stage = 0; stage < Shape::kStages - 1; ++stage, free += Shape::kStageBytes) {
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) loader.copy(i, free);
    loader.end_step();
    if (loader.pass(1) && threadIdx.x < 32) walk.write(params.schedule, loader.next_item());
    __syncthreads();
  }
  const int first_row = lane % 8 / 2 * 8 + lane % 2;
  const std::uint32_t rows_at = Shape::place(warp_m * 64 + first_row + lane / 8 % 2 * 2, lane / 16);
  const std::uint32_t weights_at =
      Shape::kRowsBytes + Shape::place(warp_n * 32 + first_row + lane / 16 * 2, lane / 8 % 2);
  Sm80Operands operands[2];
  ptx::cp_async_wait<Shape::kStages - 2>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    read_operand<Shape>(operands[0], i, base + rows_at, base + weights_at);
  }
  std::uint32_t here = base;
  bool wanted = false;  // the ring needs another item
  for (std::uint32_t index = 0;; ++index) {
    if (read_work(walk.ring, index).expert < 0) break;
    Sm80Sums sums = {};
    int left = num_steps;
    do {
      // As many steps as both the products' and the loader's tile have left: no branch inside.
      const int run = min(left, loader.steps_left());
      left -= run;
#pragma unroll 1
      for (int step = run; step > 0; --step) {
        const std::uint32_t next =
            here + Shape::kStageBytes == end ? base : here + Shape::kStageBytes;
#pragma unroll
        for (int group = 0; group < Shape::kGroups; ++group) {
          const bool last = group == Shape::kGroups - 1;
          if (last) {
            // The next stage has come, and nobody needs this one any more.
            ptx::cp_async_wait<Shape::kStages - 3>();
            __syncthreads();
          }
          const std::uint32_t from = last ? next : here;
          const std::uint32_t flip = last ? 0 : static_cast<std::uint32_t>(group + 1) << 5;
          const auto copy = [&](int i) { loader.copy(group * Shape::kCopiesPerGroup + i, free); };
          multiply<T, Shape>(sums, operands[group % 2], operands[1 - group % 2],
                             (from + rows_at) ^ flip, (from + weights_at) ^ flip, copy);
        }
        loader.end_step();
        free = here;
        here = next;
      }
      wanted |= loader.pass(run);
      // The walk takes a while. At a tile's end it is hidden behind the other warps' stores; where
      // a tile has fewer steps than there are stages, it cannot wait for that.
      if (wanted && (left == 0 || num_steps < Shape::kStages)) {
        if (threadIdx.x < 32) walk.write(params.schedule, loader.next_item());
        wanted = false;
      }
    } while (left > 0);
    const Work work = read_work(walk.ring, index);
    if (work.tile.rows > warp_m * 64) {
      store_sums<T, kEpilogue>(sums, work, warp_m, warp_n, params.epilogue, params.preactivation);
    }
  }
  ptx::cp_async_wait<0>();
}

}  // namespace switchyard
