// The noise of routers on a GPU: a thread a block of four numbers of a token. Bound by memory where
// tokens are jittered, else by the generator and its logarithms.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "route/draws.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;

/// visit(token, block) of all blocks of four numbers in rows of `cols`.
template <typename Visit>
__device__ __forceinline__ void for_blocks(std::int64_t num_tokens, std::int32_t cols,
                                           const Visit& visit) {
  const std::int32_t blocks = (cols + 3) / 4;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i < num_tokens * blocks; i += stride) {
    visit(i / blocks, static_cast<std::uint32_t>(i % blocks));
  }
}

unsigned grid_for(std::int64_t num_tokens, std::int64_t cols) {
  const std::int64_t wanted = (num_tokens * ((cols + 3) / 4) + kThreads - 1) / kThreads;
  return static_cast<unsigned>(std::min<std::int64_t>(wanted, 32 * num_multiprocessors()));
}

struct JitterParams {
  const void* tokens;  // [T, H], or null: out is in and out
  float* out;          // [T, H]
  std::int64_t num_tokens;
  std::int32_t hidden;
  DType dtype;
  float size;
  Draws draws;
};

__device__ __forceinline__ float load_as_float(const void* from, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kBF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
    case DType::kF16: return __half2float(static_cast<const __half*>(from)[i]);
    default: return static_cast<const float*>(from)[i];
  }
}

__global__ void __launch_bounds__(kThreads) jitter_kernel(const __grid_constant__ JitterParams p) {
  for_blocks(p.num_tokens, p.hidden, [&](std::int64_t token, std::uint32_t block) {
    const PhiloxWords words = p.draws.words(token, block);
    const auto first = static_cast<std::int32_t>(4 * block);
#pragma unroll
    for (std::int32_t j = 0; j < 4; ++j) {
      if (first + j >= p.hidden) break;
      const std::int64_t at = token * p.hidden + first + j;
      const float x = p.tokens == nullptr ? p.out[at] : load_as_float(p.tokens, p.dtype, at);
      const float u = unit_of(words.word[j]);
      p.out[at] = __fmul_rn(x, __fmaf_rn(p.size, 2.0F * u - 1.0F, 1.0F));
    }
  });
}

struct LogitNoiseParams {
  float* logits;              // [T, E] in and out; of the backward out
  const float* noise_logits;  // [T, E], or null
  const float* dlogits;       // [T, E] of the backward
  std::int64_t num_tokens;
  std::int32_t num_experts;
  float size;
  Draws draws;
};

/// visit(place, its normal number) of all logits.
template <typename Visit>
__device__ __forceinline__ void for_normals(const LogitNoiseParams& p, const Visit& visit) {
  for_blocks(p.num_tokens, p.num_experts, [&](std::int64_t token, std::uint32_t block) {
    const PhiloxWords words = p.draws.words(token, block);
    const auto first = static_cast<std::int32_t>(4 * block);
#pragma unroll
    for (std::int32_t j = 0; j < 4; ++j) {
      if (first + j >= p.num_experts) break;
      visit(token * p.num_experts + first + j,
            normal_of(words.word[j / 2 * 2], words.word[j / 2 * 2 + 1],
                      static_cast<std::uint32_t>(j % 2)));
    }
  });
}

/// log(1 + exp(x)), also where exp(x) is too large.
__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0F) + log1pf(expf(-fabsf(x)));
}

__global__ void __launch_bounds__(kThreads)
    logit_noise_kernel(const __grid_constant__ LogitNoiseParams p) {
  for_normals(p, [&](std::int64_t at, float normal) {
    float size = p.size;
    if (p.noise_logits != nullptr) size += softplus(p.noise_logits[at]);
    p.logits[at] = __fmaf_rn(size, normal, p.logits[at]);
  });
}

__global__ void __launch_bounds__(kThreads)
    noise_backward_kernel(const __grid_constant__ LogitNoiseParams p) {
  for_normals(p, [&](std::int64_t at, float normal) {
    const float slope = 1.0F / (1.0F + expf(-p.noise_logits[at]));
    p.logits[at] = p.dlogits[at] * normal * slope;
  });
}

template <typename Args>
std::optional<std::string> reject(const Args& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  return std::nullopt;
}

void run(const NoiseArgs& args) {
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  if (args.noise.kind == RouterNoise::Kind::kInputJitter) {
    const auto [num_tokens, hidden] = args.jittered.shape;
    if (args.jittered.size() == 0) return;
    const JitterParams params{.tokens = args.tokens.data,
                              .out = args.jittered.data,
                              .num_tokens = num_tokens,
                              .hidden = static_cast<std::int32_t>(hidden),
                              .dtype = args.tokens.dtype,
                              .size = args.noise.size,
                              .draws = Draws(args.request, Draws::For::kJitter)};
    jitter_kernel<<<grid_for(num_tokens, hidden), kThreads, 0, stream>>>(params);
    SWITCHYARD_CUDA(cudaGetLastError());
    return;
  }
  const auto [num_tokens, num_experts] = args.logits.shape;
  if (args.logits.size() == 0) return;
  const bool learned = args.noise.kind == RouterNoise::Kind::kLearned;
  const LogitNoiseParams params{.logits = args.logits.data,
                                .noise_logits = learned ? args.noise_logits.data : nullptr,
                                .dlogits = nullptr,
                                .num_tokens = num_tokens,
                                .num_experts = static_cast<std::int32_t>(num_experts),
                                .size = args.noise.size,
                                .draws = Draws(args.request, Draws::For::kLogits)};
  logit_noise_kernel<<<grid_for(num_tokens, num_experts), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void run_backward(const NoiseBackwardArgs& args) {
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const auto [num_tokens, num_experts] = args.dlogits.shape;
  if (args.dlogits.size() == 0) return;
  if (!args.request.training) {
    SWITCHYARD_CUDA(cudaMemsetAsync(args.dnoise_logits.data, 0,
                                    sizeof(float) * static_cast<std::size_t>(args.dlogits.size()),
                                    stream));
    return;
  }
  const LogitNoiseParams params{.logits = args.dnoise_logits.data,
                                .noise_logits = args.noise_logits.data,
                                .dlogits = args.dlogits.data,
                                .num_tokens = num_tokens,
                                .num_experts = static_cast<std::int32_t>(num_experts),
                                .size = args.noise.size,
                                .draws = Draws(args.request, Draws::For::kLogits)};
  noise_backward_kernel<<<grid_for(num_tokens, num_experts), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<NoiseArgs> kNoiseCuda{"cuda.philox", reject<NoiseArgs>, run};
const Implementation<NoiseBackwardArgs> kNoiseBackwardCuda{"cuda.philox", reject<NoiseBackwardArgs>,
                                                           run_backward};

}  // namespace switchyard
