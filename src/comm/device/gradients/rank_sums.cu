// Sums over ranks in place: every rank has its part in its own window. Rank r reads share r of all
// parts, adds them up by the tree of ranks, and writes the sums over all parts: nobody else reads
// or writes that share meanwhile. Each value crosses the wire twice. Bound by the wire.
#include "comm/device/combine_parts.cuh"
#include "core/gpu/cuda_check.hpp"

namespace switchyard {
namespace {

/// Neighbours, then pairs of neighbours: ((0+1)+(2+3))+...
template <int kRanks>
__device__ __forceinline__ float4 add_by_tree(float4 (&part)[kRanks], int ranks) {
#pragma unroll
  for (int step = 1; step < kRanks; step *= 2) {
#pragma unroll
    for (int r = 0; r + step < kRanks; r += 2 * step) {
      if (r + step >= ranks) continue;
      part[r] = {__fadd_rn(part[r].x, part[r + step].x), __fadd_rn(part[r].y, part[r + step].y),
                 __fadd_rn(part[r].z, part[r + step].z), __fadd_rn(part[r].w, part[r + step].w)};
    }
  }
  return part[0];
}

/// Vectors [begin, end) of all parts become their sums.
template <int kRanks>
__device__ void add_share(const DeviceExchangeParams& p, std::int64_t begin, std::int64_t end) {
  constexpr int kBatch = 16 / kRanks;  // asked for before one is used
  const int ranks = p.layout.num_ranks;
  float4* of[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    of[r] = reinterpret_cast<float4*>(p.window[r < ranks ? r : p.rank] + p.layout.summed());
  }
  const std::int64_t stride = std::int64_t{gridDim.x} * kExchangeThreads;
  for (std::int64_t first = begin + std::int64_t{blockIdx.x} * kExchangeThreads + threadIdx.x;
       first < end; first += kBatch * stride) {
    float4 part[kBatch][kRanks];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const std::int64_t at = first + j * stride;
        part[j][r] = at < end && r < ranks ? of[r][at] : float4{};
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const std::int64_t at = first + j * stride;
      if (at >= end) continue;
      const float4 sum = add_by_tree<kRanks>(part[j], ranks);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r < ranks) of[r][at] = sum;
      }
    }
  }
}

template <int kRanks>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    sum_kernel(const __grid_constant__ DeviceSumParams args) {
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const auto thread = static_cast<int>(threadIdx.x);
  const int to = (p.rank + thread) % ranks;  // of the first threads
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->sums) + 1;
  // This rank's part is there: the kernels that made it have ended.
  if (blockIdx.x == 0 && thread < ranks) {
    store_release_system(p.window[to] + p.layout.parts_flag(p.rank), epoch);
  }
  bool here = true;
  if (thread < ranks) {
    here = wait_for(p, p.layout.parts_flag(thread), epoch, DevicePhase::kParts, thread);
  }
  if (__syncthreads_and(here ? 1 : 0) == 0) return;
  const std::int64_t vectors = (args.count + 3) / 4;
  const std::int64_t share = (vectors + ranks - 1) / ranks;
  add_share<kRanks>(p, min(vectors, p.rank * share), min(vectors, (p.rank + 1) * share));
  __syncthreads();
  if (thread < ranks) add_release_system(p.window[to] + p.layout.sums_flag(p.rank));
  if (blockIdx.x == 0) {
    if (thread < ranks) {
      here = wait_for(p, p.layout.sums_flag(thread), epoch * gridDim.x, DevicePhase::kSums, thread);
    }
    if (__syncthreads_and(here ? 1 : 0) == 0) return;
    // A rank that has given up before may have gone on to make other parts.
    if (thread == 0 && load_relaxed_system(p.window[p.rank] + p.layout.abort_flag()) != 0) {
      give_up(p, 2, DevicePhase::kSums, p.rank, epoch, epoch);
    }
  }
  if (thread == 0 && atomicAdd(&p.state->combine_done, 1U) == gridDim.x - 1) {
    p.state->combine_done = 0;
    p.state->sums = epoch;
  }
}

using SumKernel = void (*)(DeviceSumParams);

SumKernel sum_kernel_of(int num_ranks) {
  return for_parts(num_ranks,
                   []<int kRanks>(NumParts<kRanks>) -> SumKernel { return sum_kernel<kRanks>; });
}

}  // namespace

void load_sum_kernel(int num_ranks) {
  cudaFuncAttributes attributes;
  SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, sum_kernel_of(num_ranks)));
}

void launch_sum_over_ranks(const DeviceSumParams& params, int ctas, void* stream) {
  sum_kernel_of(params.exchange.layout.num_ranks)<<<static_cast<unsigned>(ctas), kExchangeThreads,
                                                    0, static_cast<cudaStream_t>(stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
