#pragma once

// The Hopper grouped GEMM's kernel: barriers, launch ahead, and who does what.

#include "experts/gpu/grouped/sm90/multiply.cuh"

namespace switchyard {

template <typename Shape>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Shape::kThreads, 1)
    grouped_gemm_sm90(const __grid_constant__ CUtensorMap weights,
                      const __grid_constant__ CUtensorMap rows,
                      const __grid_constant__ CUtensorMap out,
                      const __grid_constant__ CUtensorMap tall_weights,
                      const __grid_constant__ Sm90Params params) {
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
    for (int group = 0; group < 2; ++group)
      ptx::mbarrier_init(base + Shape::kTurnAt + group * 8, 4);
    ring.init();
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&weights);
    ptx::prefetch_tensor_map(&out);
    if (!Shape::kGather) ptx::prefetch_tensor_map(&rows);
  }
  ptx::cluster_sync();
  // The second product may fetch its first weights while this one ends, and lets nobody start, so
  // that what came before the first one is over for both.
  if (Shape::kEpilogue != Epilogue::kLinear) ptx::start_after_previous_kernel();
  const Sm90Context<Shape> context{params,
                                   &out,
                                   &tall_weights,
                                   base,
                                   cta,
                                   ring,
                                   (params.depth + Shape::kTileK - 1) / Shape::kTileK};
  const int group = static_cast<int>(threadIdx.x / 128);
  if (group == 0) {
    ptx::lower_registers<Shape::kLoadRegisters>();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp == 0) {
      run_loader(context, &weights, &rows);
    } else if (Shape::kGather && warp >= 2) {
      run_gather(context);
    } else if (Shape::kGather && warp == 1) {
      run_fence(context);
    }
  } else {
    ptx::raise_registers<Shape::kMultiplyRegisters>();
    Multiplier<Shape> multiplier(context, group - 1);
    if constexpr (Shape::kPingPong) {
      multiplier.run_ping_pong();
    } else {
      multiplier.run_cooperative();
    }
  }
  __syncwarp();
  ptx::cluster_sync();  // nobody leaves while the other CTA may still write here
}

}  // namespace switchyard
