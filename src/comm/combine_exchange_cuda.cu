// Combine between GPUs in one launch: rows that hold the experts' sums go straight home, the
// sources interleaved row by row (sorted by source the same took twice as long), each rank starting
// at another one; then every block waits for all owners and adds the parts of its tokens by the
// binary tree over ranks, in fp32. Bound by the wire, then by memory.
#include <algorithm>
#include <type_traits>

#include "comm/device_exchange.cuh"
#include "core/cuda_check.hpp"

namespace switchyard {
namespace {

/// What the rows of `partials` are where they travel as Wire.
template <typename Wire>
using Partial = std::conditional_t<kIsFp8<Wire>, float, Wire>;

template <typename Wire>
__device__ void send_result(const DeviceCombineParams& args, int home, std::int64_t row,
                            std::int64_t place, int piece) {
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t hidden = p.layout.hidden;
  const auto* from = static_cast<const Partial<Wire>*>(args.partials) + row * hidden;
  std::byte* const window = p.window[home];
  auto* const to = reinterpret_cast<Wire*>(window + p.layout.result(place));
  Eight<Partial<Wire>> in[kPieceSteps];
#pragma unroll
  for (int step = 0; step < kPieceSteps; ++step) {
    const std::int64_t at = std::int64_t{piece} * kPieceValues + step * 256 + lane * 8;
    in[step] = {};
    if (at < hidden) in[step] = *reinterpret_cast<const Eight<Partial<Wire>>*>(from + at);
  }
#pragma unroll
  for (int step = 0; step < kPieceSteps; ++step) {
    const std::int64_t at = std::int64_t{piece} * kPieceValues + step * 256 + lane * 8;
    if constexpr (kIsFp8<Wire>) {
      float scale;
      const Eight<Wire> out = encode<Wire>(in[step], scale);
      if (at >= hidden) continue;
      *reinterpret_cast<Eight<Wire>*>(to + at) = out;
      if (at % kScaleBlock == 0) {
        reinterpret_cast<float*>(window + p.layout.result_scale(place))[at / kScaleBlock] = scale;
      }
    } else if (at < hidden) {
      *reinterpret_cast<Eight<Wire>*>(to + at) = in[step];
    }
  }
}

template <typename Wire>
__device__ void send_results(const DeviceCombineParams& args) {
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  std::int64_t most = 0;
  for (int s = 0; s < ranks; ++s) most = max(most, p.state->source_rows[s]);
  const auto pieces = static_cast<int>((p.layout.hidden + kPieceValues - 1) / kPieceValues);
  const std::int64_t stride = std::int64_t{gridDim.x} * kExchangeWarps;
  const std::int64_t warp = blockIdx.x + std::int64_t{gridDim.x} * (threadIdx.x / 32);
  for (std::int64_t i = warp; i < most * ranks * pieces; i += stride) {
    const auto piece = static_cast<int>(i % pieces);
    const std::int64_t row = i / pieces / ranks;
    const int home = static_cast<int>((p.rank + i / pieces) % ranks);
    if (row >= p.state->source_rows[home]) continue;
    send_result<Wire>(args, home, p.state->source_begin[home] + row, p.rank * p.max_tokens + row,
                      piece);
  }
}

__device__ __forceinline__ void store_out(const DeviceCombineParams& args, std::int64_t at,
                                          const float (&sum)[8]) {
  if (args.out_type == DType::kF32) {
    auto* const out = reinterpret_cast<float4*>(static_cast<float*>(args.out) + at);
    out[0] = {sum[0], sum[1], sum[2], sum[3]};
    out[1] = {sum[4], sum[5], sum[6], sum[7]};
  } else if (args.out_type == DType::kBF16) {
    Eight<__nv_bfloat16> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.value[i] = __float2bfloat16_rn(sum[i]);
    *reinterpret_cast<Eight<__nv_bfloat16>*>(static_cast<__nv_bfloat16*>(args.out) + at) = out;
  } else {
    Eight<__half> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.value[i] = __float2half_rn(sum[i]);
    *reinterpret_cast<Eight<__half>*>(static_cast<__half*>(args.out) + at) = out;
  }
}

/// 8 values of a token: the parts of kParts ranks (a power of two, absent ones +0) by the tree.
template <typename Wire, int kParts>
__device__ __forceinline__ void add_parts(const DeviceCombineParams& args,
                                          const std::int32_t (&slot)[kParts], std::int64_t at,
                                          float (&sum)[8]) {
  const DeviceExchangeParams& p = args.exchange;
  const std::byte* const window = p.window[p.rank];
  Eight<Wire> part[kParts];
  float scale[kParts];
#pragma unroll
  for (int r = 0; r < kParts; ++r) {
    part[r] = {};
    scale[r] = 1.0F;
    if (slot[r] < 0) continue;
    const std::int64_t place = r * p.max_tokens + slot[r];
    part[r] = *reinterpret_cast<const Eight<Wire>*>(
        reinterpret_cast<const Wire*>(window + p.layout.result(place)) + at);
    if constexpr (kIsFp8<Wire>) {
      scale[r] =
          reinterpret_cast<const float*>(window + p.layout.result_scale(place))[at / kScaleBlock];
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float value[kParts];
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      value[r] = to_float(part[r].value[i]);
      if constexpr (kIsFp8<Wire>) value[r] = __fmul_rn(value[r], scale[r]);
    }
#pragma unroll
    for (int width = kParts / 2; width > 0; width /= 2) {
#pragma unroll
      for (int r = 0; r < width; ++r) value[r] = __fadd_rn(value[2 * r], value[2 * r + 1]);
    }
    sum[i] = value[0];
  }
}

template <typename Wire, int kParts>
__device__ void add_tokens(const DeviceCombineParams& args) {
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t hidden = p.layout.hidden;
  const std::int64_t warps = std::int64_t{gridDim.x} * kExchangeWarps;
  const auto pieces = static_cast<int>((hidden + kPieceValues - 1) / kPieceValues);
  for (std::int64_t i = blockIdx.x + std::int64_t{gridDim.x} * (threadIdx.x / 32);
       i < p.num_tokens * pieces; i += warps) {
    const std::int64_t token = i / pieces;
    std::int32_t slot[kParts];
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      slot[r] = r < p.layout.num_ranks ? p.slot[token * p.layout.num_ranks + r] : -1;
    }
    for (int step = 0; step < kPieceSteps; ++step) {
      const std::int64_t at = i % pieces * kPieceValues + step * 256 + lane * 8;
      if (at >= hidden) break;
      float sum[8];
      add_parts<Wire, kParts>(args, slot, at, sum);
      if (args.shared != nullptr) {
#pragma unroll
        for (int v = 0; v < 8; ++v)
          sum[v] = __fadd_rn(sum[v], args.shared[token * hidden + at + v]);
      }
      store_out(args, token * hidden + at, sum);
    }
  }
}

template <typename Wire, int kParts>
__global__ void __launch_bounds__(kExchangeThreads, 1) combine_kernel(DeviceCombineParams args) {
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->combines) + 1;
  send_results<Wire>(args);
  __syncthreads();
  bool here = true;
  if (static_cast<int>(threadIdx.x) < ranks) {
    const int to = (p.rank + static_cast<int>(threadIdx.x)) % ranks;
    add_release_system(p.window[to] + p.layout.results_flag(p.rank));
    const int from = static_cast<int>(threadIdx.x);
    here = wait_for(p, p.layout.results_flag(from), epoch * gridDim.x, DevicePhase::kResults, from);
  }
  if (__syncthreads_and(here ? 1 : 0) == 0) return;
  add_tokens<Wire, kParts>(args);
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&p.state->combine_done, 1U) == gridDim.x - 1) {
    p.state->combine_done = 0;
    p.state->combines = epoch;
  }
}

using CombineKernel = void (*)(DeviceCombineParams);

template <typename Wire>
CombineKernel combine_kernel_for(int num_ranks) {
  if (num_ranks == 1) return combine_kernel<Wire, 1>;
  if (num_ranks == 2) return combine_kernel<Wire, 2>;
  return num_ranks <= 4 ? combine_kernel<Wire, 4> : combine_kernel<Wire, 8>;
}

CombineKernel combine_kernel_of(DType wire, int num_ranks) {
  switch (wire) {
    case DType::kBF16: return combine_kernel_for<__nv_bfloat16>(num_ranks);
    case DType::kF16: return combine_kernel_for<__half>(num_ranks);
    case DType::kF8E4M3: return combine_kernel_for<__nv_fp8_e4m3>(num_ranks);
    default: return combine_kernel_for<float>(num_ranks);
  }
}

}  // namespace

void load_combine_kernels(DType wire, int num_ranks) {
  cudaFuncAttributes attributes;
  SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, combine_kernel_of(wire, num_ranks)));
}

void launch_combine(const DeviceCombineParams& params, int ctas, void* stream) {
  const ExchangeLayout& layout = params.exchange.layout;
  combine_kernel_of(layout.combine_wire,
                    layout.num_ranks)<<<static_cast<unsigned>(ctas), kExchangeThreads, 0,
                                        static_cast<cudaStream_t>(stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
