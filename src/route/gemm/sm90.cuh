#pragma once

// Router logits of many 16-bit tokens on Hopper: products exact, sums in the tensor cores' fp32.
//
// Bound by the tensor cores and the second cache level where E is large, by reading the tokens
// where it is small. A block makes 128 tokens x kColumns experts: one warp loads by TMA, two
// warpgroups multiply 64 tokens each. A cluster is two tiles of tokens, which share the loads of
// the gate, times the splits of H: where tiles are few, each of 2 or 4 blocks takes a part of the
// sums, and each adds up the parts of a part of the rows, in the order of H, out of the others'
// shared memory. No scratch, no atomics, the same bits from run to run.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/gpu/ptx.cuh"
#include "core/gpu/wgmma.cuh"
#include "route/gemm/tile.hpp"

namespace switchyard {

/// Static shape of one kernel.
template <typename T_, int kColumns_>
struct RouterSm90Shape {
  using T = T_;
  static constexpr int kColumns = kColumns_;  // experts of a tile
  static constexpr int kRows = kRouterTileRows;
  static constexpr int kDepth = kRouterTileDepth;  // 128 bytes: one swizzled row
  static constexpr int kTokenBytes = kRows * kDepth * 2;
  static constexpr int kGateBytes = kColumns * kDepth * 2;
  static constexpr int kStageBytes = kTokenBytes + kGateBytes;
  // Narrow tiles leave room for a second block, whose loads go on while one stores its sums.
  static constexpr int kBlocksPerSm = kColumns <= 128 ? 2 : 1;
  static constexpr int kStages = (kBlocksPerSm == 2 ? 98304 : 204800) / kStageBytes;
  static constexpr int kFullAt = kStages * kStageBytes;
  static constexpr int kEmptyAt = kFullAt + kStages * 8;
  static constexpr int kSharedBytes = kEmptyAt + kStages * 8;
  // Sums take the place of the stages; 8 floats more a row keep the banks apart.
  static constexpr int kSumStride = kColumns + 8;

  static constexpr int kMultiplyThreads = 256;
  static constexpr int kThreads = kMultiplyThreads + 32;
  static constexpr int kEmptyArrivals = 2 * 8;  // warps that multiply, of both blocks of a stack

  static_assert(kStages >= 3 && kSharedBytes <= 232448);
  static_assert(kRows * kSumStride * 4 <= kStages * kStageBytes, "the sums do not fit");
  static_assert(kGateBytes / 2 % 1024 == 0, "the swizzle repeats every 1024 bytes");
};

struct RouterSm90Params {
  const float* bias;  // [E] or null
  float* logits;      // [T, E]
  std::int64_t num_tokens;
  std::int32_t num_experts, steps, splits;
  bool vector_rows;  // every row of logits is aligned to 16 bytes
};

/// A block's place: tile, split, and its stack inside the cluster.
template <typename Shape>
struct RouterSm90Block {
  std::uint32_t shared;
  std::uint32_t half;   // of the stack: which tile of tokens
  std::uint32_t split;  // which part of H
  std::int32_t first_step, num_steps;

  __device__ std::uint32_t stage(std::uint32_t slot) const {
    return shared + slot * Shape::kStageBytes;
  }
  __device__ std::uint32_t full(std::uint32_t slot) const {
    return shared + Shape::kFullAt + slot * 8;
  }
  __device__ std::uint32_t empty(std::uint32_t slot) const {
    return shared + Shape::kEmptyAt + slot * 8;
  }
  /// Of the same stack.
  [[nodiscard]] __device__ std::uint32_t rank_of(std::uint32_t of_half) const {
    return 2 * split + of_half;
  }
};

/// One thread: its own tokens, and half of the gate's tile for both blocks of the stack.
template <typename Shape>
__device__ __forceinline__ void router_load(const RouterSm90Block<Shape>& block,
                                            const CUtensorMap* tokens, const CUtensorMap* gate) {
  const int first_token = static_cast<int>(blockIdx.y) * Shape::kRows;
  const int first_expert = static_cast<int>(blockIdx.x) * Shape::kColumns +
                           static_cast<int>(block.half) * (Shape::kColumns / 2);
  const auto stack = static_cast<std::uint16_t>(3U << block.rank_of(0));
  const std::uint32_t gate_at = Shape::kTokenBytes + block.half * (Shape::kGateBytes / 2);
  for (std::int32_t i = 0; i < block.num_steps; ++i) {
    const std::uint32_t slot = static_cast<std::uint32_t>(i) % Shape::kStages;
    const std::uint32_t turn = static_cast<std::uint32_t>(i) / Shape::kStages;
    const int column = (block.first_step + i) * Shape::kDepth;
    ptx::mbarrier_wait(block.empty(slot), (turn & 1U) ^ 1U);
    const std::uint32_t full = block.full(slot);
    ptx::mbarrier_arrive_expect(full, Shape::kStageBytes);
    ptx::tma_load_2d(block.stage(slot), tokens, column, first_token, full);
    ptx::tma_load_2d_multicast(block.stage(slot) + gate_at, gate, column, first_expert, full,
                               stack);
  }
}

/// Both blocks of the stack may fill the stage again, as far as this warp is concerned.
template <typename Shape>
__device__ __forceinline__ void router_release(const RouterSm90Block<Shape>& block,
                                               std::int32_t step) {
  const std::uint32_t slot = static_cast<std::uint32_t>(step) % Shape::kStages;
  const std::uint32_t lane = threadIdx.x % 32;
  if (lane < 2) {
    ptx::mbarrier_arrive_cluster(ptx::map_to_cta(block.empty(slot), block.rank_of(lane)));
  }
}

/// One warpgroup: 64 tokens by all columns; the sums then lie in shared memory, row by row.
template <typename Shape>
__device__ __forceinline__ void router_multiply(const RouterSm90Block<Shape>& block,
                                                float* shared_sums) {
  constexpr int kHalfBytes = 64 * Shape::kDepth * 2;
  const std::uint32_t group = threadIdx.x / 128;
  float sums[Shape::kColumns / 2];
#pragma unroll
  for (int i = 0; i < Shape::kColumns / 2; ++i) sums[i] = 0.0F;
  for (std::int32_t i = 0; i < block.num_steps; ++i) {
    const std::uint32_t slot = static_cast<std::uint32_t>(i) % Shape::kStages;
    ptx::mbarrier_wait(block.full(slot), static_cast<std::uint32_t>(i) / Shape::kStages & 1U);
    const std::uint64_t a = ptx::wgmma_operand(block.stage(slot) + group * kHalfBytes);
    const std::uint64_t b = ptx::wgmma_operand(block.stage(slot) + Shape::kTokenBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::kDepth / 16; ++k) {
      ptx::wgmma<typename Shape::T, Shape::kColumns>(sums, a + 2 * k, b + 2 * k, 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (i > 0) router_release(block, i - 1);
  }
  ptx::wgmma_wait<0>();
  // The compiler may not move reads of the sums above the wait.
#pragma unroll
  for (int i = 0; i < Shape::kColumns / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  ptx::named_barrier(1, Shape::kMultiplyThreads);  // nobody reads the stages any more
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16 + thread % 32 / 4;
  float* const to = shared_sums + row * Shape::kSumStride + thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < Shape::kColumns / 8; ++i) {
    *reinterpret_cast<float2*>(to + i * 8) = {sums[4 * i], sums[4 * i + 1]};
    *reinterpret_cast<float2*>(to + 8 * Shape::kSumStride + i * 8) = {sums[4 * i + 2],
                                                                      sums[4 * i + 3]};
  }
}

__device__ __forceinline__ void router_store(const RouterSm90Params& p, std::int64_t token,
                                             std::int32_t expert, const float4& sum) {
  float* const to = p.logits + token * p.num_experts + expert;
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  float logits[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    logits[j] = p.bias != nullptr && expert + j < p.num_experts
                    ? __fadd_rn(values[j], __ldg(p.bias + expert + j))
                    : values[j];
  }
  if (p.vector_rows && expert + 4 <= p.num_experts) {
    *reinterpret_cast<float4*>(to) = {logits[0], logits[1], logits[2], logits[3]};
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (expert + j < p.num_experts) to[j] = logits[j];
  }
}

/// Four neighbouring sums out of the shared memory of all splits, in the order of H.
template <typename Shape>
__device__ __forceinline__ float4 router_add_parts(const RouterSm90Params& p,
                                                   const RouterSm90Block<Shape>& block, int at) {
  const std::uint32_t address = block.shared + static_cast<std::uint32_t>(at) * 4;
  float4 sum = ptx::load_cluster_16(ptx::map_to_cta(address, block.half));
#pragma unroll
  for (std::uint32_t split = 1; split < kRouterMostSplits; ++split) {
    if (static_cast<std::int32_t>(split) >= p.splits) break;
    const float4 part = ptx::load_cluster_16(ptx::map_to_cta(address, 2 * split + block.half));
    sum.x = __fadd_rn(sum.x, part.x), sum.y = __fadd_rn(sum.y, part.y);
    sum.z = __fadd_rn(sum.z, part.z), sum.w = __fadd_rn(sum.w, part.w);
  }
  return sum;
}

/// All threads: the rows of this split.
template <typename Shape>
__device__ __forceinline__ void router_finish(const RouterSm90Params& p,
                                              const RouterSm90Block<Shape>& block,
                                              const float* sums) {
  constexpr int kPerRow = Shape::kColumns / 4;
  const int rows = Shape::kRows / p.splits;
  const int first_row = static_cast<int>(block.split) * rows;
  const std::int64_t first_token = std::int64_t{blockIdx.y} * Shape::kRows;
  const std::int32_t first_expert = static_cast<std::int32_t>(blockIdx.x) * Shape::kColumns;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < rows * kPerRow; i += Shape::kThreads) {
    const int row = first_row + i / kPerRow;
    const int column = i % kPerRow * 4;
    if (first_token + row >= p.num_tokens || first_expert + column >= p.num_experts) continue;
    const int at = row * Shape::kSumStride + column;
    const float4 sum = p.splits == 1 ? *reinterpret_cast<const float4*>(sums + at)
                                     : router_add_parts(p, block, at);
    router_store(p, first_token + row, first_expert + column, sum);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    router_gemm_sm90(const __grid_constant__ CUtensorMap tokens,
                     const __grid_constant__ CUtensorMap gate,
                     const __grid_constant__ RouterSm90Params p) {
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t rank = ptx::cluster_cta_rank();
  const auto split = static_cast<std::int32_t>(rank / 2);
  const std::int32_t first_step = p.steps * split / p.splits;
  const RouterSm90Block<Shape> block{.shared = ptx::shared_address(shared),
                                     .half = rank % 2,
                                     .split = rank / 2,
                                     .first_step = first_step,
                                     .num_steps = p.steps * (split + 1) / p.splits - first_step};
  if (threadIdx.x == 0) {
    for (std::uint32_t slot = 0; slot < Shape::kStages; ++slot) {
      ptx::mbarrier_init(block.full(slot), 1);
      ptx::mbarrier_init(block.empty(slot), Shape::kEmptyArrivals);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&tokens);
    ptx::prefetch_tensor_map(&gate);
  }
  ptx::cluster_sync();
  if (threadIdx.x < Shape::kMultiplyThreads) {
    router_multiply(block, reinterpret_cast<float*>(shared));
  } else if (threadIdx.x == Shape::kMultiplyThreads) {
    router_load(block, &tokens, &gate);
  }
  __syncwarp();
  ptx::cluster_sync();  // all parts lie in shared memory
  router_finish(p, block, reinterpret_cast<const float*>(shared));
  if (p.splits > 1) ptx::cluster_sync();  // nobody leaves while others read here
}

}  // namespace switchyard
