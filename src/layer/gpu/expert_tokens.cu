// What is done to tokens before experts take them, and what goes around these. A warp takes a piece
// of a token, 16 bytes a lane. Bound by memory: one pass over the tokens each.
#include "layer/gpu/expert_tokens.hpp"

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"

namespace switchyard {
namespace {

constexpr int kThreads = 256;

struct AroundParams {
  const void* tokens;          // [T, H]
  const std::int32_t* expert;  // [T, K]
  const float* weight;         // [T, K]
  const float* shared;         // [T, H] or null
  std::int32_t* others;        // [T, K]
  float* out;                  // [T, H]
  std::int64_t num_tokens, hidden;
  std::int32_t top_k, first_identity, num_experts;
};

struct WeightedParams {
  const void* tokens;   // [T, H]
  const float* weight;  // [T]
  void* out;            // [T, H]
  float* ones;          // [T]
  std::int64_t num_tokens, hidden;
};

/// Calls work(token, first value of this lane, piece) for each piece of each token that is this
/// warp's.
template <typename T, typename Work>
__device__ __forceinline__ void for_each_piece(std::int64_t num_tokens, std::int64_t hidden,
                                               Work&& work) {
  constexpr std::int64_t kValues = 32 * kPack<T>;
  const std::int64_t pieces = (hidden + kValues - 1) / kValues;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  const std::int64_t warp = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  for (std::int64_t i = warp; i < num_tokens * pieces; i += warps) {
    work(i / pieces, i % pieces * kValues + threadIdx.x % 32 * kPack<T>, i % pieces);
  }
}

template <typename T>
__device__ __forceinline__ void load_values(const void* tokens, std::int64_t at,
                                            float (&x)[kPack<T>]) {
  unpack16(*reinterpret_cast<const int4*>(static_cast<const T*>(tokens) + at), x, T{});
}

template <typename T>
__global__ void __launch_bounds__(kThreads) around_kernel(const AroundParams p) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  for_each_piece<T>(p.num_tokens, p.hidden,
                    [&](std::int64_t t, std::int64_t at, std::int64_t piece) {
                      const std::int32_t* const expert = p.expert + t * p.top_k;
                      const auto returns_input = [&](std::int32_t id) {
                        return id >= p.first_identity && id < p.num_experts;
                      };
                      float weight = 0.0F;
                      for (int k = 0; k < p.top_k; ++k) {
                        if (returns_input(expert[k]))
                          weight = __fadd_rn(weight, p.weight[t * p.top_k + k]);
                      }
                      for (int k = lane; piece == 0 && k < p.top_k; k += 32) {
                        p.others[t * p.top_k + k] = returns_input(expert[k]) ? -1 : expert[k];
                      }
                      if (at >= p.hidden) return;
                      const std::int64_t place = t * p.hidden + at;
                      float x[kPack<T>];
                      load_values<T>(p.tokens, place, x);
                      alignas(16) float sum[kPack<T>] = {};
#pragma unroll
                      for (int i = 0; p.shared != nullptr && i < kPack<T>; i += 4) {
                        *reinterpret_cast<float4*>(sum + i) =
                            *reinterpret_cast<const float4*>(p.shared + place + i);
                      }
#pragma unroll
                      for (int i = 0; i < kPack<T>; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
                      store_floats(p.out + place, sum);
                    });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) weighted_kernel(const WeightedParams p) {
  for_each_piece<T>(p.num_tokens, p.hidden, [&](std::int64_t t, std::int64_t at, std::int64_t) {
    if (at == 0) p.ones[t] = 1.0F;
    if (at >= p.hidden) return;
    const std::int64_t place = t * p.hidden + at;
    const float weight = p.weight[t];
    float x[kPack<T>];
    load_values<T>(p.tokens, place, x);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) x[i] = fmaf(weight, x[i], 0.0F);
    *reinterpret_cast<int4*>(static_cast<T*>(p.out) + place) = pack16(x, T{});
  });
}

struct KeepParams {
  const std::int32_t* expert;
  std::uint8_t* kept;
  const std::int64_t* counts;
  std::int64_t* counts_kept;
  std::int64_t num_assignments;
  std::int32_t first_identity, num_experts;
};

__global__ void __launch_bounds__(kThreads) keep_identity_kernel(const KeepParams p) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = first; i < p.num_assignments; i += stride) {
    if (p.expert[i] >= p.first_identity && p.expert[i] < p.num_experts) p.kept[i] = 1;
  }
  for (std::int64_t e = p.first_identity + first; e < p.num_experts; e += stride) {
    p.counts_kept[e] = p.counts[e];
  }
}

unsigned blocks_for(std::int64_t threads) {
  const std::int64_t wanted = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(std::clamp<std::int64_t>(wanted, 1, 16 * num_multiprocessors()));
}

/// Threads that take 16 bytes each of tokens whose pieces are whole warps'.
std::int64_t threads_for(ConstRawMatrix tokens) {
  return tokens.rows * ((tokens.row_bytes() + 511) / 512) * 32;
}

/// Calls with a value of the type for `dtype`.
template <typename Call>
void with_type(DType dtype, Call&& call) {
  switch (dtype) {
    case DType::kBF16: call(__nv_bfloat16{}); break;
    case DType::kF16: call(__half{}); break;
    default: call(float{}); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

void require_pieces(ConstRawMatrix tokens) {
  if (tokens.row_bytes() % 16 == 0 && is_aligned_16(tokens.data)) return;
  fail(ErrorCode::kUnsupported,
       "weight_on_input and identity_experts on CUDA: tokens of {} bytes want multiples of 16, at "
       "an "
       "address that is one",
       tokens.row_bytes());
}

}  // namespace

CudaExpertTokens::CudaExpertTokens(const LayerConfig& config)
    : first_identity_(config.experts.num_experts),
      num_experts_(config.router.num_experts),
      top_k_(config.router.top_k()),
      hidden_(config.experts.hidden),
      on_input_(config.weight_on_input) {}

void CudaExpertTokens::reserve(std::int64_t num_tokens, DType compute) {
  if (first_identity_ < num_experts_) {
    (void)expert_.matrix<std::int32_t>(num_tokens, top_k_);
    (void)around_.matrix<float>(num_tokens, hidden_);
  }
  if (!on_input_) return;
  (void)weighted_.matrix(compute, num_tokens, hidden_);
  (void)ones_.matrix<float>(num_tokens, 1);
}

ExpertInput CudaExpertTokens::run(ConstRawMatrix tokens, const Routing& routing,
                                  Matrix<const float> shared, const Execution& execution) {
  ExpertInput input{.x = tokens, .routing = routing, .around = shared};
  const bool has_identity = first_identity_ < num_experts_;
  if (tokens.rows == 0 || (!has_identity && !on_input_)) return input;
  require_pieces(tokens);
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const auto bytes = static_cast<double>(tokens.bytes());
  const unsigned blocks = blocks_for(threads_for(tokens));
  if (has_identity) {
    const Matrix<std::int32_t> others = expert_.matrix<std::int32_t>(tokens.rows, top_k_);
    const Matrix<float> around = around_.matrix<float>(tokens.rows, tokens.cols);
    const ScopedStage stage(execution, "shared",
                            {.bytes = bytes + 4 * static_cast<double>(around.size())});
    const AroundParams params{.tokens = tokens.data,
                              .expert = routing.expert.data,
                              .weight = routing.weight.data,
                              .shared = shared.data,
                              .others = others.data,
                              .out = around.data,
                              .num_tokens = tokens.rows,
                              .hidden = tokens.cols,
                              .top_k = top_k_,
                              .first_identity = first_identity_,
                              .num_experts = num_experts_};
    with_type(tokens.dtype,
              [&]<typename T>(T) { around_kernel<T><<<blocks, kThreads, 0, stream>>>(params); });
    input.routing.expert = others;
    input.around = around;
  }
  if (on_input_) {
    const RawMatrix weighted = weighted_.matrix(tokens.dtype, tokens.rows, tokens.cols);
    const Matrix<float> ones = ones_.matrix<float>(tokens.rows, 1);
    const ScopedStage stage(execution, "pack", {.bytes = 2 * bytes});
    const WeightedParams params{.tokens = tokens.data,
                                .weight = routing.weight.data,
                                .out = weighted.data,
                                .ones = ones.data,
                                .num_tokens = tokens.rows,
                                .hidden = tokens.cols};
    with_type(tokens.dtype,
              [&]<typename T>(T) { weighted_kernel<T><<<blocks, kThreads, 0, stream>>>(params); });
    input.x = weighted;
    input.routing.weight = ones;
  }
  return input;
}

void keep_identity(Matrix<const std::int32_t> expert, std::int32_t first_identity,
                   Matrix<std::uint8_t> kept, Vector<const std::int64_t> counts,
                   Vector<std::int64_t> counts_kept, cudaStream_t stream) {
  const KeepParams params{.expert = expert.data,
                          .kept = kept.data,
                          .counts = counts.data,
                          .counts_kept = counts_kept.data,
                          .num_assignments = expert.size(),
                          .first_identity = first_identity,
                          .num_experts = static_cast<std::int32_t>(counts.shape[0])};
  keep_identity_kernel<<<blocks_for(expert.size()), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
