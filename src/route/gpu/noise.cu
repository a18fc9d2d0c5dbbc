// The noise of routers on a GPU: a thread a block of four numbers of a token. Bound by memory where
// tokens are jittered, else by the generator and by the operations in double of normal numbers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "route/gpu/noise.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kThreads = 512;
constexpr int kBlocksPerMultiprocessor = 2;

/// visit(token, block) of all blocks of four numbers in rows of `cols`.
template <typename Visit>
__device__ __forceinline__ void for_blocks(std::int64_t num_tokens, std::int32_t cols,
                                           const Visit& visit) {
  // One division a thread: steps are of so many tokens and blocks.
  const auto blocks = static_cast<unsigned>(cols + 3) / 4;
  const unsigned first = blockIdx.x * kThreads + threadIdx.x;
  const unsigned step = gridDim.x * kThreads;
  const unsigned step_tokens = step / blocks;
  const unsigned step_blocks = step % blocks;
  unsigned block = first % blocks;
  for (std::int64_t token = first / blocks; token < num_tokens; token += step_tokens) {
    visit(token, block);
    block += step_blocks;
    if (block >= blocks) block -= blocks, ++token;
  }
}

unsigned grid_for(std::int64_t num_tokens, std::int64_t cols) {
  const std::int64_t wanted = (num_tokens * ((cols + 3) / 4) + kThreads - 1) / kThreads;
  return static_cast<unsigned>(
      std::min<std::int64_t>(wanted, kBlocksPerMultiprocessor * num_multiprocessors()));
}

struct JitterParams {
  const void* tokens;  // [T, H], or null: out is in and out
  float* out;          // [T, H]
  std::int64_t num_tokens;
  std::int32_t hidden;
  DType dtype;
  float size;
  PreparedDraws draws;
};

__device__ __forceinline__ float load_as_float(const void* from, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kBF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
    case DType::kF16: return __half2float(static_cast<const __half*>(from)[i]);
    default: return static_cast<const float*>(from)[i];
  }
}

__global__ void __launch_bounds__(kThreads) jitter_kernel(const __grid_constant__ JitterParams p) {
  ptx::start_after_previous_kernel();
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
  bool in_line;  // rows of whole float4
  PreparedDraws draws;
};

/// visit(place, up to four normal numbers, how many) of all logits.
template <typename Visit>
__device__ __forceinline__ void for_normals(const LogitNoiseParams& p, const Visit& visit) {
  __shared__ NormalTables tables;
  load_tables(tables);
  __syncthreads();
  ptx::start_after_previous_kernel();
  for_blocks(p.num_tokens, p.num_experts, [&](std::int64_t token, std::uint32_t block) {
    const auto first = static_cast<std::int32_t>(4 * block);
    visit(token * p.num_experts + first, normals_of(p.draws.words(token, block), tables),
          min(4, p.num_experts - first));
  });
}

/// Up to four neighbouring numbers, moved as one where rows are whole float4.
struct Four {
  float v[4];

  __device__ __forceinline__ void load(const float* from, std::int32_t count, bool in_line) {
    if (in_line) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = j < count ? from[j] : 0.0F;
  }
  __device__ __forceinline__ void store(float* to, std::int32_t count, bool in_line) const {
    if (in_line) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < count) to[j] = v[j];
    }
  }
};

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    logit_noise_kernel(const __grid_constant__ LogitNoiseParams p) {
  for_normals(p, [&](std::int64_t at, const float4& normal, std::int32_t count) {
    const float of[4] = {normal.x, normal.y, normal.z, normal.w};
    Four logits;
    logits.load(p.logits + at, count, p.in_line);
    Four size{{p.size, p.size, p.size, p.size}};
    if (p.noise_logits != nullptr) {
      size.load(p.noise_logits + at, count, p.in_line);
#pragma unroll
      for (float& v : size.v) v = p.size + softplus(v);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) logits.v[j] = __fmaf_rn(size.v[j], of[j], logits.v[j]);
    logits.store(p.logits + at, count, p.in_line);
  });
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    noise_backward_kernel(const __grid_constant__ LogitNoiseParams p) {
  for_normals(p, [&](std::int64_t at, const float4& normal, std::int32_t count) {
    const float of[4] = {normal.x, normal.y, normal.z, normal.w};
    Four size;
    Four gradient;
    size.load(p.noise_logits + at, count, p.in_line);
    gradient.load(p.dlogits + at, count, p.in_line);
#pragma unroll
    for (int j = 0; j < 4; ++j) gradient.v[j] *= of[j] * (1.0F / (1.0F + expf(-size.v[j])));
    gradient.store(p.logits + at, count, p.in_line);
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
                              .draws = PreparedDraws(Draws(args.request, Draws::For::kJitter))};
    launch_overlapped(jitter_kernel, grid_for(num_tokens, hidden), kThreads, 0, stream, params);
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
                                .in_line = num_experts % 4 == 0 &&
                                           is_aligned_16(args.logits.data) &&
                                           is_aligned_16(args.noise_logits.data),
                                .draws = PreparedDraws(Draws(args.request, Draws::For::kLogits))};
  launch_overlapped(logit_noise_kernel, grid_for(num_tokens, num_experts), kThreads, 0, stream,
                    params);
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
  const LogitNoiseParams params{
      .logits = args.dnoise_logits.data,
      .noise_logits = args.noise_logits.data,
      .dlogits = args.dlogits.data,
      .num_tokens = num_tokens,
      .num_experts = static_cast<std::int32_t>(num_experts),
      .size = args.noise.size,
      .in_line = num_experts % 4 == 0 && is_aligned_16(args.dnoise_logits.data) &&
                 is_aligned_16(args.noise_logits.data) && is_aligned_16(args.dlogits.data),
      .draws = PreparedDraws(Draws(args.request, Draws::For::kLogits))};
  launch_overlapped(noise_backward_kernel, grid_for(num_tokens, num_experts), kThreads, 0, stream,
                    params);
}

}  // namespace

const Implementation<NoiseArgs> kNoiseCuda{"cuda.philox", reject<NoiseArgs>, run};
const Implementation<NoiseBackwardArgs> kNoiseBackwardCuda{"cuda.philox", reject<NoiseBackwardArgs>,
                                                           run_backward};

}  // namespace switchyard
