// The way back of weights on the experts' inputs: products of two rows, a warp a token. Bound by
// memory.
#include "layer/gpu/backward/expert_tokens.hpp"

#include "core/gpu/token_pieces.cuh"

namespace switchyard {
namespace {

constexpr int kThreads = kTokenThreads;

struct WeightedBackwardParams {
  const void* tokens;   // [T, H]
  const float* weight;  // [T]
  float* dx;            // [T, H]
  float* dweight;       // [T] or null
  std::int64_t num_tokens, hidden;
};

__device__ __forceinline__ float sum_of_warp(float sum) {
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
  return sum;
}

/// Calls work(token) for each token that is this warp's.
template <typename Work>
__device__ __forceinline__ void for_each_token(std::int64_t num_tokens, Work&& work) {
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  const std::int64_t warp = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  for (std::int64_t t = warp; t < num_tokens; t += warps) work(t);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    weighted_backward_kernel(const WeightedBackwardParams p) {
  const auto lane = static_cast<std::int64_t>(threadIdx.x % 32);
  for_each_token(p.num_tokens, [&](std::int64_t t) {
    const float weight = p.weight[t];
    float product = 0.0F;
    for (std::int64_t h = lane * kPack<T>; h < p.hidden; h += 32 * kPack<T>) {
      float x[kPack<T>];
      load_token_values<T>(p.tokens, t * p.hidden + h, x);
      float* const dx = p.dx + t * p.hidden + h;
#pragma unroll
      for (int i = 0; i < kPack<T>; i += 4) {
        float4 part = *reinterpret_cast<const float4*>(dx + i);
        product = fmaf(part.x, x[i], product);
        product = fmaf(part.y, x[i + 1], product);
        product = fmaf(part.z, x[i + 2], product);
        product = fmaf(part.w, x[i + 3], product);
        part.x *= weight, part.y *= weight, part.z *= weight, part.w *= weight;
        *reinterpret_cast<float4*>(dx + i) = part;
      }
    }
    product = sum_of_warp(product);
    if (lane == 0 && p.dweight != nullptr) p.dweight[t] = product;
  });
}

}  // namespace

void weighted_backward_on_gpu(ConstRawMatrix tokens, Matrix<const float> weight, Matrix<float> dx,
                              Matrix<float> dweight, const Execution& execution) {
  if (tokens.rows == 0) return;
  const ScopedStage stage(
      execution, "pack",
      {.bytes = static_cast<double>(tokens.bytes()) + 8 * static_cast<double>(dx.size())});
  const WeightedBackwardParams params{.tokens = tokens.data,
                                      .weight = weight.data,
                                      .dx = dx.data,
                                      .dweight = dweight.data,
                                      .num_tokens = tokens.rows,
                                      .hidden = tokens.cols};
  with_token_type(tokens.dtype, [&]<typename T>(T) {
    weighted_backward_kernel<T>
        <<<token_blocks(32 * tokens.rows), kThreads, 0, stream_of_call(execution)>>>(params);
  });
}

}  // namespace switchyard
