// Router logits of very few 16-bit tokens: a decode step. Bound by latency: a block takes one
// expert, and all of its row of the gate is under way at once, before the previous kernel of the
// stream has ended. Products are exact, sums in fp32: a thread's columns in order, a tree over the
// warp, the warps in order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"
#include "core/shape_check.hpp"
#include "route/gemm/bits16.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMostLoads = 8;   // of 16 bytes a thread: rows of up to 8192 columns in one go
constexpr int kMostTokens = 4;  // more are quicker on tensor cores
constexpr unsigned kAll = 0xffffffffU;

struct RouterFewParams {
  const uint4* tokens;                           // [T, H / 8]
  const uint4* gate;                             // [E, H / 8]
  const float* bias;                             // [E] or null
  float* logits;                                 // [T, E]
  std::int32_t num_tokens, num_experts, pieces;  // of 8 values a row
};

template <typename T>
__device__ __forceinline__ float2 to_floats(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }
}

template <typename T>
__device__ __forceinline__ void multiply(const uint4& x, const uint4& w, float2& sum) {
  const std::uint32_t xs[4] = {x.x, x.y, x.z, x.w};
  const std::uint32_t ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = to_floats<T>(xs[i]);
    const float2 b = to_floats<T>(ws[i]);
    sum.x = __fmaf_rn(a.x, b.x, sum.x), sum.y = __fmaf_rn(a.y, b.y, sum.y);
  }
}

/// A thread's pieces of a row from `first` on; zeros past its end.
template <int kLoads>
__device__ __forceinline__ void load_pieces(const uint4* row, int first, int pieces,
                                            uint4 (&to)[kLoads]) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = first + i * kThreads + static_cast<int>(threadIdx.x);
    to[i] = at < pieces ? row[at] : uint4{};
  }
}

/// kTokens: T or more; the last token is computed again in place of those that are not there.
/// kLoads: of a row at a time; no more than a row has, so that all tokens' are under way together.
template <typename T, int kTokens, int kLoads>
__global__ void __launch_bounds__(kThreads)
    router_gemm_few_kernel(const __grid_constant__ RouterFewParams p) {
  __shared__ float parts[kWarps][kTokens];
  const int thread = static_cast<int>(threadIdx.x);
  const auto expert = static_cast<std::int32_t>(blockIdx.x);
  const uint4* const gate = p.gate + std::int64_t{expert} * p.pieces;
  uint4 w[kLoads];
  load_pieces(gate, 0, p.pieces, w);
  ptx::start_after_previous_kernel();

  float2 sum[kTokens] = {};
  for (int first = 0; first < p.pieces; first += kLoads * kThreads) {
    if (first > 0) load_pieces(gate, first, p.pieces, w);
    uint4 x[kTokens][kLoads];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const std::int64_t token = min(t, p.num_tokens - 1);
      load_pieces(p.tokens + token * p.pieces, first, p.pieces, x[t]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) multiply<T>(x[t][i], w[i], sum[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    float total = sum[t].x + sum[t].y;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(kAll, total, offset);
    if (thread % 32 == 0) parts[thread / 32][t] = total;
  }
  __syncthreads();
  if (thread >= p.num_tokens) return;
  float logit = parts[0][thread];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) logit += parts[warp][thread];
  if (p.bias != nullptr) logit = __fadd_rn(logit, p.bias[expert]);
  p.logits[thread * p.num_experts + expert] = logit;
}

template <typename T, int kLoads>
void launch_loads(const RouterFewParams& params, bool gate_is_fresh, cudaStream_t stream) {
  const auto kernel = params.num_tokens == 1   ? router_gemm_few_kernel<T, 1, kLoads>
                      : params.num_tokens == 2 ? router_gemm_few_kernel<T, 2, kLoads>
                                               : router_gemm_few_kernel<T, kMostTokens, kLoads>;
  launch_overlapped_if(!gate_is_fresh, kernel, params.num_experts, kThreads, 0, stream, params);
}

template <typename T>
void launch_type(const RouterFewParams& params, bool gate_is_fresh, cudaStream_t stream) {
  if (params.pieces <= 2 * kThreads) return launch_loads<T, 2>(params, gate_is_fresh, stream);
  if (params.pieces <= 4 * kThreads) return launch_loads<T, 4>(params, gate_is_fresh, stream);
  launch_loads<T, kMostLoads>(params, gate_is_fresh, stream);
}

std::optional<std::string> reject(const RouterGemmArgs& args) {
  if (const auto reason = reject_unless_16_bit(args)) return reason;
  if (args.tokens.rows > kMostTokens) return "more than 4 tokens";
  return std::nullopt;
}

void run(const RouterGemmArgs& args) {
  if (args.tokens.rows == 0) return;
  const RouterFewParams params{.tokens = reinterpret_cast<const uint4*>(args.tokens.data),
                               .gate = reinterpret_cast<const uint4*>(args.gate.data),
                               .bias = args.bias.data,
                               .logits = args.logits.data,
                               .num_tokens = static_cast<std::int32_t>(args.tokens.rows),
                               .num_experts = static_cast<std::int32_t>(args.gate.rows),
                               .pieces = static_cast<std::int32_t>(args.tokens.cols / 8)};
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  if (args.tokens.dtype == DType::kBF16) {
    return launch_type<__nv_bfloat16>(params, args.gate_is_fresh, stream);
  }
  launch_type<__half>(params, args.gate_is_fresh, stream);
}

}  // namespace

const Implementation<RouterGemmArgs> kRouterGemmFew{"cuda.few_tokens", reject, run};

}  // namespace switchyard
