#pragma once

// The grouped product of bf16 rows with codes on Hopper. Bound by the memory of the codes where
// experts have up to some 60 rows (MXFP4: 16), by decoding and the tensor cores beyond.
//
// A block takes items (64 rows of an expert's weights for each of its four or two warpgroups that
// multiply, up to kRows of its token rows) in turn and sums each over all of K. Codes come once
// from memory, are decoded once for all rows of the item, and go from registers to wgmma as the M
// side; token rows are in shared memory as the N side, read once by each of these warpgroups.

#include <type_traits>

#include "experts/gpu/grouped/coded/multiply.cuh"
#include "experts/gpu/grouped/coded/multiply_split.cuh"
#include "experts/gpu/grouped/coded/product.hpp"

namespace switchyard {

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    grouped_coded(const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap rows,
                  const __grid_constant__ CodedParams params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const CodedRing<Shape> ring{ptx::shared_address(shared)};
  if (threadIdx.x == 0) {
    ring.init();
    ptx::prefetch_tensor_map(&weights);
    if (Shape::kOrdered) ptx::prefetch_tensor_map(&rows);
  }
  constexpr bool kSecond = Shape::kEpilogue == CodedEpilogue::kLinear;
  // A product behind the kernel that writes its rows is let in when the plan is complete, and waits
  // for these rows alone.
  constexpr bool kFollows = kSecond || Shape::kOrdered;
  if (!kFollows) ptx::start_after_previous_kernel();
  if (kFollows && !kSecond) ptx::let_next_kernel_start();
  const CodedWalk walk = list_hits<Shape>(params, shared);
  const int turns = (params.depth + kCodedTurn - 1) / kCodedTurn;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < Shape::kMultiplyWarps) {
    ptx::raise_registers<Shape::kMultiplyRegisters>();
    using Multiplier =
        std::conditional_t<Shape::kSplit, SplitMultiplier<Shape>, WideMultiplier<Shape>>;
    Multiplier(ring, params, shared, turns).run(walk);
    return;
  }
  ptx::lower_registers<Shape::kLoadRegisters>();
  if (warp == Shape::kWeightWarp) {
    if (threadIdx.x % 32 == 0) load_weights(ring, walk, &weights, turns);
  } else if (Shape::kOrdered) {
    if (warp != Shape::kRowsWarp || threadIdx.x % 32 != 0) return;
    ptx::wait_for_previous_kernel();
    ptx::fence_proxy_async_global();  // it has written the rows
    load_rows(ring, walk, params, &rows, turns);
  } else if (warp == Shape::kRowsWarp) {
    if (threadIdx.x % 32 == 0) pass_rows_on(ring, walk, turns);
  } else {
    if (kSecond) ptx::wait_for_previous_kernel();
    gather_rows(ring, walk, params, turns, warp - Shape::kGatherWarp);
  }
}

}  // namespace switchyard
