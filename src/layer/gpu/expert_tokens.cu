// What is done to tokens before experts take them. A warp takes a piece of a token, 16 bytes a
// lane. Bound by memory: one pass over the tokens.
#include "layer/gpu/expert_tokens.hpp"

#include "core/gpu/token_pieces.cuh"

namespace switchyard {
namespace {

constexpr int kThreads = kTokenThreads;

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

/// Threads that take 16 bytes each of tokens whose pieces are whole warps'.
std::int64_t threads_for(ConstRawMatrix tokens) {
  return tokens.rows * ((tokens.row_bytes() + 511) / 512) * 32;
}

void require_pieces(ConstRawMatrix tokens) {
  if (tokens.row_bytes() % 16 == 0 && is_aligned_16(tokens.data)) return;
  fail(
      ErrorCode::kUnsupported,
      "weight_on_input on CUDA: tokens of {} bytes want multiples of 16, at an address that is one",
      tokens.row_bytes());
}

}  // namespace

CudaExpertTokens::CudaExpertTokens(const LayerModel& model)
    : zero_computation_(model), on_input_(model.config.weight_on_input) {}

void CudaExpertTokens::reserve(std::int64_t num_tokens, std::int64_t hidden, DType compute) {
  zero_computation_.reserve(num_tokens);
  if (!on_input_) return;
  (void)weighted_.matrix(compute, num_tokens, hidden);
  (void)ones_.matrix<float>(num_tokens, 1);
}

TokensForExperts CudaExpertTokens::run(const ChosenTokens& chosen, Matrix<const float> shared,
                                       const Execution& execution) {
  TokensForExperts input{.x = chosen.x, .routing = chosen.routing, .around = shared};
  if (chosen.x.rows == 0) return input;
  if (zero_computation_.any()) {
    input.routing.expert = zero_computation_.without(chosen, shared, input.around, execution);
  }
  put_weights_on_input(input, execution);
  return input;
}

TokensForExperts CudaExpertTokens::again(const ChosenTokens& chosen, const Execution& execution) {
  TokensForExperts input{.x = chosen.x, .routing = chosen.routing};
  if (chosen.x.rows == 0) return input;
  if (zero_computation_.any()) {
    input.routing.expert = zero_computation_.without(chosen, execution);
  }
  put_weights_on_input(input, execution);
  return input;
}

void CudaExpertTokens::put_weights_on_input(TokensForExperts& input, const Execution& execution) {
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

}  // namespace switchyard
