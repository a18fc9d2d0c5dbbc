#pragma once

// The grouped product of e4m3 on Hopper. It loads as the 16-bit one does (sm90/gemm.cuh), for whose
// loading warps two codes are one value: a stage has 128 rows by 128 codes and 256 rows of weights.
// Here each of the two multiplying warpgroups has 64 rows and all of the weights' rows, in two
// halves with a scale each: in the first product the gate's 128 columns and the up ones, so that a
// thread has both parts of an output, and four threads the 128 outputs of a row that share a scale.

#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/grouped/fp8/multiply.cuh"
#include "experts/gpu/grouped/fp8/product.hpp"

namespace switchyard {

/// One thread: the weights of a tile, and its rows where they are contiguous.
template <bool kGated>
__device__ __forceinline__ void load_tile(const Sm90Context<Fp8Shape<kGated>>& context,
                                          const Work& work, const CUtensorMap* weights,
                                          const CUtensorMap* rows, StageCursor<4>& cursor,
                                          bool is_first) {
  using Shape = Fp8Shape<kGated>;
  const CtaTile& tile = work.tile;
  constexpr std::uint32_t kHalfWeights = Shape::kWeightsBytes / 2;
  constexpr std::uint32_t kHalfRowsBytes = Shape::kRowsBytes / 2;
  constexpr int kGroups = 128 / coded::kGroupRows;
  std::uint32_t bytes = Shape::kWeightsBytes;
  if (!kGated) {
    bytes += tile.rows > kHalfRows ? Shape::kRowsBytes : tile.rows > 0 ? kHalfRowsBytes : 0;
  }
  const auto half_group = [&](int half) {
    return kGated ? tile.column_tile * kGroups : (tile.column_tile * 2 + half) * kGroups;
  };
  const auto half_matrix = [&](int half) { return kGated ? 2 * work.expert + half : work.expert; };
  const auto load_weights = [&](const StageCursor<4>& to_stage, int step) {
    const std::uint32_t full = context.full(to_stage);
    const std::uint32_t to = context.weights_at(to_stage);
    constexpr int kStepElements = 128 * coded::kGroupRows / 8;  // of 8 bytes
    ptx::mbarrier_wait(context.empty(to_stage), to_stage.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, bytes);
    if (tile.share_weights) {
      const int half = static_cast<int>(context.cta);
      ptx::tma_load_3d_multicast(to + context.cta * kHalfWeights, weights, step * kStepElements,
                                 half_group(half), half_matrix(half), full, 3);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::tma_load_3d(to + half * kHalfWeights, weights, step * kStepElements, half_group(half),
                         half_matrix(half), full);
      }
    }
  };
  const auto load_rows = [&](const StageCursor<4>& to_stage, int step) {
    if constexpr (!kGated) {
      const std::uint32_t full = context.full(to_stage);
      const std::uint32_t to = context.rows_at(to_stage);
      const int k = step * Shape::kTileK;
      if (tile.rows > 0) ptx::tma_load_2d(to, rows, k, tile.row, full);
      if (tile.rows > kHalfRows) {
        ptx::tma_load_2d(to + kHalfRowsBytes, rows, k, tile.row + kHalfRows, full);
      }
    }
  };
  int step = 0;
  if (!kGated && is_first) {
    // The weights need not wait for the kernel that writes the rows.
    StageCursor<4> begin = cursor;
    const int ahead = min(Shape::kStages, context.num_steps);
    for (; step < ahead; ++step, cursor.advance()) load_weights(cursor, step);
    wait_for_rows();
    for (int s = 0; s < ahead; ++s, begin.advance()) load_rows(begin, s);
  }
  for (; step < context.num_steps; ++step, cursor.advance()) {
    load_weights(cursor, step);
    load_rows(cursor, step);
  }
}

template <bool kGated>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Fp8Shape<kGated>::kThreads, 1)
    grouped_fp8(const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap rows, const __grid_constant__ Sm90Params params,
                const __grid_constant__ Fp8Params fp8) {
  using Shape = Fp8Shape<kGated>;
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t cta = ptx::cluster_cta_rank();
  const UnitRing ring(base + Shape::kMessagesAt, base + Shape::kRingAt, cta);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(base + Shape::kFullAt + stage * 8, Shape::kFullArrivals);
      ptx::mbarrier_init(base + Shape::kEmptyAt + stage * 8, Shape::kEmptyArrivals);
      ptx::mbarrier_init(base + Shape::kGatheredAt + stage * 8, Shape::kGatherThreads);
    }
    ring.init();
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&weights);
    if (!kGated) ptx::prefetch_tensor_map(&rows);
  }
  ptx::cluster_sync();
  if (kGated) ptx::start_after_previous_kernel();
  const Sm90Context<Shape> context{params,
                                   nullptr,
                                   nullptr,
                                   base,
                                   cta,
                                   ring,
                                   (params.depth + Shape::kTileK - 1) / Shape::kTileK};
  // By a lane's word: addresses that depend on it then stay in registers of the whole warp, where
  // the tensor core's descriptors have to be, and are not moved there between two products.
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 128), 0);
  if (group == 0) {
    ptx::lower_registers<Shape::kLoadRegisters>();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp == 0) {
      run_loader(context, &weights, &rows);
    } else if (kGated && warp >= 2) {
      run_gather(context);
    } else if (kGated && warp == 1) {
      run_fence(context);
    }
  } else {
    ptx::raise_registers<Shape::kMultiplyRegisters>();
    Fp8Multiplier<kGated>(context, fp8, group - 1).run();
  }
  __syncwarp();
  ptx::cluster_sync();  // nobody leaves while the other CTA may still write here
}

}  // namespace switchyard
