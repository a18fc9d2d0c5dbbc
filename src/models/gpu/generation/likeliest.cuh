#pragma once

#include <climits>
#include <cmath>

#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {

__device__ __forceinline__ Best no_best() { return {-INFINITY, INT_MAX}; }
__device__ __forceinline__ Best best_of(float logit, std::int64_t id) {
  return {logit, isnan(logit) ? -1 : static_cast<int>(id)};
}
__device__ __forceinline__ Best better(Best a, Best b) {
  if (a.id < 0 || b.id < 0) return a.id < 0 ? a : b;
  if (a.logit != b.logit) return a.logit > b.logit ? a : b;
  return a.id < b.id ? a : b;
}
__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    best = better(best, {__shfl_xor_sync(0xffffffffU, best.logit, i),
                         __shfl_xor_sync(0xffffffffU, best.id, i)});
  }
  return best;
}

/// Of all of a block's threads; the first one has it.
__device__ __forceinline__ Best best_of_block(Best best) {
  __shared__ Best of_warps[32];
  best = best_of_warp(best);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) of_warps[warp] = best;
  __syncthreads();
  if (warp > 0) return best;
  const bool there = lane < static_cast<int>(blockDim.x) / 32;
  return best_of_warp(there ? of_warps[lane] : no_best());
}

}  // namespace switchyard::models::gpu
