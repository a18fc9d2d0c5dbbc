// What is done to tokens before experts take them, and what goes around these. A warp takes a piece
// of a token, 16 bytes a lane. Bound by memory: one pass over the tokens each.
#include "layer/gpu/expert_tokens.hpp"

#include "core/gpu/token_pieces.cuh"

namespace switchyard {
namespace {

constexpr int kThreads = kTokenThreads;

struct AroundParams {
  const void* tokens;          // [T, H]
  const std::int32_t* expert;  // [T, K]
  const float* weight;         // [T, K]
  const float* shared;         // [T, H] or null
  std::int32_t* others;        // [T, K] or null
  float* out;                  // [T, H] or null
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
__device__ __forceinline__ void around_piece(const AroundParams& p, std::int64_t t, std::int64_t at,
                                             std::int64_t piece) {
  const std::int32_t* const expert = p.expert + t * p.top_k;
  const auto returns_input = [&](std::int32_t id) {
    return id >= p.first_identity && id < p.num_experts;
  };
  float weight = 0.0F;
  for (int k = 0; k < p.top_k; ++k) {
    if (returns_input(expert[k])) weight = __fadd_rn(weight, p.weight[t * p.top_k + k]);
  }
  if (p.others != nullptr && piece == 0) {
    for (int k = static_cast<int>(threadIdx.x) % 32; k < p.top_k; k += 32) {
      p.others[t * p.top_k + k] = returns_input(expert[k]) ? -1 : expert[k];
    }
  }
  if (at >= p.hidden || p.out == nullptr) return;
  const std::int64_t place = t * p.hidden + at;
  float x[kPack<T>];
  load_token_values<T>(p.tokens, place, x);
  alignas(16) float sum[kPack<T>] = {};
#pragma unroll
  for (int i = 0; p.shared != nullptr && i < kPack<T>; i += 4) {
    *reinterpret_cast<float4*>(sum + i) = *reinterpret_cast<const float4*>(p.shared + place + i);
  }
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
  store_floats(p.out + place, sum);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) around_kernel(const AroundParams p) {
  for_each_piece<T>(p.num_tokens, p.hidden,
                    [&](std::int64_t t, std::int64_t at, std::int64_t piece) {
                      around_piece<T>(p, t, at, piece);
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
    load_token_values<T>(p.tokens, place, x);
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

/// Threads that take 16 bytes each of tokens whose pieces are whole warps'.
std::int64_t threads_for(ConstRawMatrix tokens) {
  return tokens.rows * ((tokens.row_bytes() + 511) / 512) * 32;
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
  if (tokens.rows == 0) return input;
  if (first_identity_ < num_experts_) {
    const Matrix<float> around = around_.matrix<float>(tokens.rows, tokens.cols);
    leave_out_identity(input, around.data, shared, execution);
    input.around = around;
  }
  put_weights_on_input(input, execution);
  return input;
}

ExpertInput CudaExpertTokens::again(ConstRawMatrix tokens, const Routing& routing,
                                    const Execution& execution) {
  ExpertInput input{.x = tokens, .routing = routing};
  if (tokens.rows == 0) return input;
  if (first_identity_ < num_experts_) leave_out_identity(input, nullptr, {}, execution);
  put_weights_on_input(input, execution);
  return input;
}

void CudaExpertTokens::leave_out_identity(ExpertInput& input, float* around,
                                          Matrix<const float> shared, const Execution& execution) {
  const ConstRawMatrix tokens = input.x;
  require_pieces(tokens);
  const Matrix<std::int32_t> others = expert_.matrix<std::int32_t>(tokens.rows, top_k_);
  const double written = around == nullptr ? 0 : static_cast<double>(tokens.rows * tokens.cols);
  const ScopedStage stage(execution, "shared",
                          {.bytes = static_cast<double>(tokens.bytes()) + 4 * written});
  const AroundParams params{.tokens = tokens.data,
                            .expert = input.routing.expert.data,
                            .weight = input.routing.weight.data,
                            .shared = shared.data,
                            .others = others.data,
                            .out = around,
                            .num_tokens = tokens.rows,
                            .hidden = tokens.cols,
                            .top_k = top_k_,
                            .first_identity = first_identity_,
                            .num_experts = num_experts_};
  with_token_type(tokens.dtype, [&]<typename T>(T) {
    around_kernel<T>
        <<<token_blocks(threads_for(tokens)), kThreads, 0, stream_of_call(execution)>>>(params);
  });
  input.routing.expert = others;
}

void CudaExpertTokens::put_weights_on_input(ExpertInput& input, const Execution& execution) {
  if (!on_input_) return;
  const ConstRawMatrix tokens = input.x;
  require_pieces(tokens);
  const RawMatrix weighted = weighted_.matrix(tokens.dtype, tokens.rows, tokens.cols);
  const Matrix<float> ones = ones_.matrix<float>(tokens.rows, 1);
  const ScopedStage stage(execution, "pack", {.bytes = 2 * static_cast<double>(tokens.bytes())});
  const WeightedParams params{.tokens = tokens.data,
                              .weight = input.routing.weight.data,
                              .out = weighted.data,
                              .ones = ones.data,
                              .num_tokens = tokens.rows,
                              .hidden = tokens.cols};
  with_token_type(tokens.dtype, [&]<typename T>(T) {
    weighted_kernel<T>
        <<<token_blocks(threads_for(tokens)), kThreads, 0, stream_of_call(execution)>>>(params);
  });
  input.x = weighted;
  input.routing.weight = ones;
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
  keep_identity_kernel<<<token_blocks(expert.size()), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void identity_tokens_on_gpu(const IdentityPicks& picks, ConstRawMatrix dout,
                            Matrix<const float> rest, Matrix<float> dtokens,
                            const Execution& execution) {
  if (dout.rows == 0) return;
  const ScopedStage stage(
      execution, "shared",
      {.bytes = static_cast<double>(dout.bytes()) + 8 * static_cast<double>(dtokens.size())});
  const AroundParams params{.tokens = dout.data,
                            .expert = picks.expert.data,
                            .weight = picks.weight.data,
                            .shared = rest.data,
                            .others = nullptr,
                            .out = dtokens.data,
                            .num_tokens = dout.rows,
                            .hidden = dout.cols,
                            .top_k = static_cast<std::int32_t>(picks.expert.shape[1]),
                            .first_identity = picks.first_identity,
                            .num_experts = picks.num_experts};
  with_token_type(dout.dtype, [&]<typename T>(T) {
    around_kernel<T>
        <<<token_blocks(threads_for(dout)), kThreads, 0, stream_of_call(execution)>>>(params);
  });
}

}  // namespace switchyard
