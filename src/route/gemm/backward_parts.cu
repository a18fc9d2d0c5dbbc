#include "route/gemm/backward_parts.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/gpu/cuda_check.hpp"

namespace switchyard {
namespace {

using namespace router_backward;

constexpr int kThreads = 256;

struct BiasParams {
  const float* dlogits;  // [T, E]
  float* out;            // [parts, E]
  std::int64_t num_tokens, part_tokens;
  std::int32_t num_experts;
};

/// Sums of dlogits over the tokens of a part: a lane an expert, a warp every eighth token.
__global__ void __launch_bounds__(kThreads) bias_kernel(const __grid_constant__ BiasParams p) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float sums[kWarps][32];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int expert = static_cast<int>(blockIdx.x) * 32 + lane;
  const std::int64_t begin = std::int64_t{blockIdx.y} * p.part_tokens;
  const std::int64_t end = min(p.num_tokens, begin + p.part_tokens);
  float sum = 0.0F;
  if (expert < p.num_experts) {
#pragma unroll 4
    for (std::int64_t t = begin + warp; t < end; t += kWarps) {
      sum = __fadd_rn(sum, p.dlogits[t * p.num_experts + expert]);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || expert >= p.num_experts) return;
  for (int w = 1; w < kWarps; ++w) sum = __fadd_rn(sum, sums[w][lane]);
  p.out[std::int64_t{blockIdx.y} * p.num_experts + expert] = sum;
}

struct AddPartsParams {
  const float* parts;  // [num_parts, size]
  void* out;           // [size]
  std::int64_t size;
  std::int32_t num_parts;
  bool accumulate;
};

template <typename Out>
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(const __grid_constant__ AddPartsParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + static_cast<int>(threadIdx.x);
  if (i >= p.size) return;
  float sum = 0.0F;
#pragma unroll 8
  for (int part = 0; part < p.num_parts; ++part) {
    sum = __fadd_rn(sum, __ldcs(p.parts + part * p.size + i));
  }
  Out& out = static_cast<Out*>(p.out)[i];
  if (p.accumulate) sum = __fadd_rn(static_cast<float>(out), sum);
  if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
    out = __float2bfloat16_rn(sum);
  } else if constexpr (std::is_same_v<Out, __half>) {
    out = __float2half_rn(sum);
  } else {
    out = sum;
  }
}

void add_parts(const AddPartsParams& params, DType out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(params.size, kThreads));
  switch (out) {
    case DType::kBF16:
      add_parts_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case DType::kF16: add_parts_kernel<__half><<<blocks, kThreads, 0, stream>>>(params); break;
    default: add_parts_kernel<float><<<blocks, kThreads, 0, stream>>>(params); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

cudaStream_t stream_of(const RouterGemmBackwardArgs& args) {
  return static_cast<cudaStream_t>(args.execution.stream);
}

}  // namespace

void router_backward::add_gate_parts(const RouterGemmBackwardArgs& args, const float* sums,
                                     std::int64_t num_parts) {
  add_parts({.parts = sums,
             .out = args.dgate.data,
             .size = args.dgate.rows * args.dgate.cols,
             .num_parts = static_cast<std::int32_t>(num_parts),
             .accumulate = args.accumulate},
            args.dgate.dtype, stream_of(args));
}

void router_backward::make_bias_gradient(const RouterGemmBackwardArgs& args, float* sums,
                                         const Parts& parts) {
  const auto [num_tokens, num_experts] = args.dlogits.shape;
  const BiasParams params{.dlogits = args.dlogits.data,
                          .out = sums,
                          .num_tokens = num_tokens,
                          .part_tokens = parts.tokens,
                          .num_experts = static_cast<std::int32_t>(num_experts)};
  const dim3 grid(static_cast<unsigned>(blocks_of(num_experts, 32)),
                  static_cast<unsigned>(parts.count));
  bias_kernel<<<grid, kThreads, 0, stream_of(args)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
  add_parts({.parts = sums,
             .out = args.dbias.data,
             .size = num_experts,
             .num_parts = static_cast<std::int32_t>(parts.count),
             .accumulate = args.accumulate},
            DType::kF32, stream_of(args));
}

}  // namespace switchyard
