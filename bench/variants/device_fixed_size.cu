// Equal messages between GPUs: warps take rows, the destinations in turn, each rank starting at
// another one; a row is copied by its token or becomes zeros. Then a flag to every rank, and block
// 0 waits for those of all. Bound by the wire.
#include "bench/variants/device_fixed_size_kernel.hpp"
#include "comm/device/exchange.cuh"
#include "core/gpu/cuda_check.hpp"

namespace switchyard {
namespace {

__device__ __forceinline__ void push_row(const int4* from, int4* to, int words, int lane) {
  constexpr int kBatch = 8;  // loads under way
  int i = lane;
  if (from == nullptr) {
    for (; i < words; i += 32) to[i] = {0, 0, 0, 0};
    return;
  }
  for (; i + (kBatch - 1) * 32 < words; i += kBatch * 32) {
    int4 value[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) value[j] = from[i + j * 32];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[i + j * 32] = value[j];
  }
  for (; i < words; i += 32) to[i] = from[i];
}

__global__ void __launch_bounds__(kExchangeThreads, 1)
    fixed_size_kernel(const __grid_constant__ FixedSizeParams args) {
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->dispatches) + 1;
  // The places of this epoch are free: the last exchange has ended here, so all ranks have begun
  // it, and were done with what the one before it had left.
  const std::int64_t buffer = p.layout.buffer_in_turn(epoch);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto words = static_cast<int>(p.layout.row_bytes() / 16);
  const std::int64_t stride = std::int64_t{gridDim.x} * kExchangeWarps;
  for (std::int64_t i = blockIdx.x + std::int64_t{gridDim.x} * (threadIdx.x / 32);
       i < args.rows_per_pair * ranks; i += stride) {
    const std::int64_t j = i / ranks;
    const int to = static_cast<int>((p.rank + i) % ranks);
    const std::int64_t begin = args.begin[to];
    const bool own = j < args.begin[to + 1] - begin;
    const int4* const from =
        own ? static_cast<const int4*>(args.x) + std::int64_t{args.token[begin + j]} * words
            : nullptr;
    push_row(from,
             reinterpret_cast<int4*>(p.window[to] +
                                     p.layout.row(buffer, p.rank * args.rows_per_pair + j)),
             words, lane);
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < ranks) {
    const int to = (p.rank + static_cast<int>(threadIdx.x)) % ranks;
    add_release_system(p.window[to] + p.layout.rows_flag(p.rank, 0));
  }
  if (blockIdx.x == 0) {
    const int from = static_cast<int>(threadIdx.x);
    const bool here = from >= ranks || wait_for(p, p.layout.rows_flag(from, 0), epoch * gridDim.x,
                                                DevicePhase::kRows, from);
    if (__syncthreads_and(here ? 1 : 0) == 0) return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&p.state->dispatch_done, 1U) == gridDim.x - 1) {
      p.state->dispatch_done = 0;
      p.state->dispatches = epoch;
    }
  }
}

}  // namespace

void load_fixed_size_kernel() {
  cudaFuncAttributes attributes;
  SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, fixed_size_kernel));
}

void launch_fixed_size(const FixedSizeParams& params, int ctas, void* stream) {
  fixed_size_kernel<<<static_cast<unsigned>(ctas), kExchangeThreads, 0,
                      static_cast<cudaStream_t>(stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
