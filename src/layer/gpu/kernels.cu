// What the layer does between its stages: conversion of tokens, the plan of shared experts, and
// what a call leaves for the host. Bound by memory and by launches.
#include <algorithm>
#include <cmath>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"
#include "core/gpu/ptx.cuh"
#include "layer/gpu/kernels.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}

template <typename In, typename Out>
__global__ void convert_kernel(const In* in, Out* out, std::int64_t size) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size;
       i += stride) {
    out[i] = from_float<Out>(to_float(in[i]));
  }
}

template <typename In, typename Out>
void launch_convert(ConstRawMatrix in, RawMatrix out, cudaStream_t stream) {
  const std::int64_t size = in.rows * in.cols;
  const std::int64_t wanted = (size + kThreads - 1) / kThreads;
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(wanted, 32 * num_multiprocessors()));
  convert_kernel<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const In*>(in.data),
                                                  reinterpret_cast<Out*>(out.data), size);
  SWITCHYARD_CUDA(cudaGetLastError());
}

template <typename In>
void convert_from(ConstRawMatrix in, RawMatrix out, cudaStream_t stream) {
  switch (out.dtype) {
    case DType::kBF16: return launch_convert<In, __nv_bfloat16>(in, out, stream);
    case DType::kF16: return launch_convert<In, __half>(in, out, stream);
    default: return launch_convert<In, float>(in, out, stream);
  }
}

struct OneExpertParams {
  const void* tokens;  // [T, H]
  const float* gate;   // [H] or null
  PlanView plan;
  std::int32_t num_tokens, hidden;
};

/// A warp a token.
template <typename T>
__global__ void __launch_bounds__(kThreads) one_expert_kernel(const OneExpertParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (token == 0 && lane == 0) {
    p.plan.expert_begin.data[0] = 0;
    p.plan.expert_begin.data[1] = p.num_tokens;
    p.plan.expert_rows.data[0] = p.num_tokens;
    p.plan.token_begin.data[p.num_tokens] = p.num_tokens;
  }
  if (token >= p.num_tokens) return;
  float weight = 1.0F;
  if (p.gate != nullptr) {
    const T* const row = static_cast<const T*>(p.tokens) + std::int64_t{token} * p.hidden;
    float dot = 0.0F;
    for (int h = lane; h < p.hidden; h += 32) dot = fmaf(to_float(row[h]), p.gate[h], dot);
    for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_xor_sync(0xffffffffU, dot, offset);
    weight = 1.0F / (1.0F + expf(-dot));
  }
  if (lane != 0) return;
  p.plan.row_token.data[token] = token;
  p.plan.row_weight.data[token] = weight;
  p.plan.token_begin.data[token] = token;
  p.plan.token_row.data[token] = token;
}

__global__ void report_kernel(CallStatusOnDevice from, CallStatus* to) {
  ptx::start_after_previous_kernel();
  const auto i = static_cast<std::int32_t>(threadIdx.x);
  if (i == 0) {
    to->status = *from.status;
    to->rows_used = *from.rows_used;
    to->rows_executed = *from.rows_executed;
  }
  if (i < from.num_rank_pairs) to->rows_between_ranks[i] = from.rows_between_ranks[i];
}

}  // namespace

void convert(ConstRawMatrix in, RawMatrix out, cudaStream_t stream) {
  if (in.rows * in.cols == 0) return;
  switch (in.dtype) {
    case DType::kBF16: return convert_from<__nv_bfloat16>(in, out, stream);
    case DType::kF16: return convert_from<__half>(in, out, stream);
    default: return convert_from<float>(in, out, stream);
  }
}

void plan_one_expert(ConstRawMatrix tokens, const float* gate, const PlanView& plan,
                     cudaStream_t stream) {
  const OneExpertParams params{.tokens = tokens.data,
                               .gate = gate,
                               .plan = plan,
                               .num_tokens = static_cast<std::int32_t>(tokens.rows),
                               .hidden = static_cast<std::int32_t>(tokens.cols)};
  const auto blocks = static_cast<unsigned>(
      std::max<std::int64_t>(1, (tokens.rows * 32 + kThreads - 1) / kThreads));
  switch (tokens.dtype) {
    case DType::kBF16:
      one_expert_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case DType::kF16: one_expert_kernel<__half><<<blocks, kThreads, 0, stream>>>(params); break;
    default: one_expert_kernel<float><<<blocks, kThreads, 0, stream>>>(params); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

void report(const CallStatusOnDevice& from, CallStatus* to, cudaStream_t stream) {
  launch_overlapped(report_kernel, 1, CallStatus::kMaxRankPairs, 0, stream, from, to);
}

}  // namespace switchyard
