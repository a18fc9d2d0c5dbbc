#pragma once

// What the counting sorts of plan and capacity share on a GPU: each block counts its part of the
// assignments per expert, all blocks meet once, and then every block knows how many come before
// its own. Places follow from counts alone: no atomic decides one.

#include <cuda_runtime.h>

#include <cstdint>

#include "core/gpu/stage_workspace.hpp"

namespace switchyard::counting {

inline constexpr int kThreads = 1024;
inline constexpr int kMaxExperts = 1024;
inline constexpr unsigned kAll = 0xffffffffU;

/// Bytes of workspace for `blocks` blocks: the head, then their counts.
constexpr std::int64_t workspace_bytes(std::int64_t blocks, std::int64_t num_experts) {
  return std::int64_t{sizeof(StageWorkspace)} + 4 * blocks * num_experts;
}

/// All blocks of the grid, which must be resident together (a cooperative launch), meet here:
/// writes before are seen by all after. Thread 0 gets a ticket for leave().
__device__ __forceinline__ unsigned meet(StageWorkspace* workspace) {
  __syncthreads();
  if (gridDim.x == 1) return 0;
  unsigned ticket = 0;
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&workspace->blocks_arrived)
                 : "memory");
    unsigned seen = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(seen)
                   : "l"(&workspace->blocks_arrived)
                   : "memory");
    } while (seen < gridDim.x);
    // Its answer is waited for in leave() only.
    ticket = atomicAdd(&workspace->blocks_left, 1U);
  }
  __syncthreads();
  return ticket;
}

/// At the end of the kernel: the last block to leave puts the counters back to zero.
__device__ __forceinline__ void leave(StageWorkspace* workspace, unsigned ticket) {
  if (threadIdx.x != 0 || gridDim.x == 1 || ticket != gridDim.x - 1) return;
  workspace->blocks_left = 0;
  workspace->blocks_arrived = 0;
}

/// Adds up all blocks, and the blocks before this one, per expert; `counts` is [blocks, E] in
/// global memory. `total` and `before` must be zero. Slices of the block take every n-th row so
/// that the loads overlap.
__device__ __forceinline__ void sum_blocks(const std::uint32_t* counts, int num_experts,
                                           std::uint32_t* total, std::uint32_t* before) {
  constexpr int kAtOnce = 8;
  int width = 32;
  while (width < num_experts) width *= 2;
  const int slices = kThreads / width;
  const int e = static_cast<int>(threadIdx.x) % width;
  if (e < num_experts) {
    std::uint32_t all = 0;
    std::uint32_t mine = 0;
    const auto blocks = static_cast<int>(gridDim.x);
    for (int first = static_cast<int>(threadIdx.x) / width; first < blocks;
         first += kAtOnce * slices) {
      // All loads before the first sum.
      std::uint32_t count[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int b = first + i * slices;
        count[i] = b < blocks ? __ldcg(counts + b * num_experts + e) : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        all += count[i];
        mine += first + i * slices < static_cast<int>(blockIdx.x) ? count[i] : 0;
      }
    }
    atomicAdd(total + e, all);
    atomicAdd(before + e, mine);
  }
  __syncthreads();
}

/// Exclusive prefix sum over the threads of the block, in thread order; `sums` is [33] shared and
/// free again after the block's next barrier.
template <typename T>
__device__ __forceinline__ T scan_block(T value, T* sums, T* total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  T sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(kAll, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const T mine = sums[lane];
    T scan = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const T other = __shfl_up_sync(kAll, scan, offset);
      if (lane >= offset) scan += other;
    }
    sums[lane] = scan - mine;
    if (lane == 31) sums[32] = scan;
  }
  __syncthreads();
  *total = sums[32];
  return sums[warp] + sum - value;
}

/// The rank of this thread's expert among the block's threads with the same, in thread order;
/// count[e] becomes the number of threads with e. `tile` is [32, E] shared.
__device__ __forceinline__ std::uint32_t rank_in_block(int expert, int num_experts,
                                                       std::uint16_t* tile, std::uint32_t* count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int i = static_cast<int>(threadIdx.x); i < num_experts * 16; i += kThreads) {
    reinterpret_cast<std::uint32_t*>(tile)[i] = 0;
  }
  const unsigned peers = __match_any_sync(kAll, expert);
  const auto in_warp = static_cast<std::uint32_t>(__popc(peers & ((1U << lane) - 1)));
  __syncthreads();
  if (expert >= 0 && in_warp == 0) {
    tile[warp * num_experts + expert] = static_cast<std::uint16_t>(__popc(peers));
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kThreads) {
    std::uint32_t sum = 0;
#pragma unroll
    for (int first = 0; first < 32; first += 16) {
      // All loads before the first store: the compiler must assume that they meet.
      std::uint16_t here[16];
#pragma unroll
      for (int w = 0; w < 16; ++w) here[w] = tile[(first + w) * num_experts + e];
#pragma unroll
      for (int w = 0; w < 16; ++w) {
        tile[(first + w) * num_experts + e] = static_cast<std::uint16_t>(sum);
        sum += here[w];
      }
    }
    count[e] = sum;
  }
  __syncthreads();
  return expert < 0 ? 0 : tile[warp * num_experts + expert] + in_warp;
}

}  // namespace switchyard::counting
