// The way back of zero-computation experts: of weights and tokens a warp a token, of constants sums
// over parts of 256 tokens, which are added in ascending order.
#include "layer/gpu/zero_computation/picks.cuh"
#include "layer/gpu/zero_computation/zero_computation.hpp"

namespace switchyard {
namespace {

using zero_computation::Picks;

constexpr int kConstantTokens = kTokenThreads;       // a thread looks at one of them
constexpr int kConstantColumns = 4 * kTokenThreads;  // of a block, four a thread
constexpr int kConstantWarps = kTokenThreads / 32;

struct WeightsParams {
  Picks picks;
  const void* tokens;  // [T, H]
  const void* dout;    // [T, H]
  float* dweight;      // [T, K] or null
  float* slope;        // [T, K] dL/d(s1 - s2) of constant picks, of others 0; or null
};

struct TokensParams {
  Picks picks;
  const void* dout;    // [T, H]
  const float* slope;  // [T, K] or null
  const float* rest;   // [T, H] or null
  float* out;          // [T, H]
};

struct ConstantsParams {
  Picks picks;
  const void* tokens;  // [T, H]
  const void* dout;    // [T, H]
  const float* slope;  // [T, K]
  float* parts;        // [parts, C, 2, H]: of W's first row, and of v
  float* out;          // [C, 3, H]
  std::int64_t num_parts;
  std::int32_t num_constants;
  bool accumulate;
};

/// <a token, its gradient>, by one warp; the same in all lanes.
template <typename T>
__device__ __forceinline__ float product_of_rows(const void* tokens, const void* dout,
                                                 std::int64_t at, std::int64_t hidden) {
  float sum = 0.0F;
  for (std::int64_t h = threadIdx.x % 32 * kPack<T>; h < hidden; h += 32 * kPack<T>) {
    float x[kPack<T>], dy[kPack<T>];
    load_token_values<T>(tokens, at + h, x);
    load_token_values<T>(dout, at + h, dy);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sum = fmaf(x[i], dy[i], sum);
  }
  return zero_computation::sum_of_warp(sum);
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads) of_picks_kernel(const WeightsParams params) {
  const Picks& p = params.picks;
  const int lane = static_cast<int>(threadIdx.x % 32);
  zero_computation::for_each_token(p.num_tokens, [&](std::int64_t t) {
    const std::int64_t first = t * p.top_k;
    bool any = false;
    for (std::int64_t i = first + lane; i < first + p.top_k; i += 32) {
      any = any || zero_computation::is_one(p, p.expert[i]);
      if (params.slope != nullptr) params.slope[i] = 0.0F;
    }
    if (__ballot_sync(0xffffffffU, any) == 0) return;
    __syncwarp();  // lane 0 writes some slopes again
    const std::int64_t at = t * p.hidden;
    const float of_token = product_of_rows<T>(params.tokens, params.dout, at, p.hidden);
    for (std::int64_t i = first; i < first + p.top_k; ++i) {
      const std::int32_t id = p.expert[i];
      if (!zero_computation::is_one(p, id)) continue;
      float dweight = zero_computation::share_of_token(p, i, id) * of_token;
      if (zero_computation::is_constant(p, id) && zero_computation::is_kept(p, i)) {
        const float of_vector = zero_computation::product_with<T>(
            zero_computation::constant_row(p, id, 2), params.dout, at, p.hidden);
        dweight = fmaf(p.of_constant[i], of_vector, dweight);
        if (lane == 0 && params.slope != nullptr) {
          params.slope[i] =
              p.weight[i] * (p.of_token[i] * p.of_constant[i]) * (of_token - of_vector);
        }
      }
      if (lane == 0 && params.dweight != nullptr) params.dweight[i] = dweight;
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads) of_tokens_kernel(const TokensParams params) {
  const Picks& p = params.picks;
  zero_computation::for_each_piece<T>(
      p.num_tokens, p.hidden, [&](std::int64_t t, std::int64_t at, std::int64_t /*piece*/) {
        if (at >= p.hidden) return;
        const std::int64_t place = t * p.hidden + at;
        float dy[kPack<T>];
        load_token_values<T>(params.dout, place, dy);
        alignas(16) float sum[kPack<T>] = {};
        if (params.rest != nullptr) load_floats(params.rest + place, sum);
        float weight = 0.0F;
        for (std::int64_t k = t * p.top_k; k < (t + 1) * p.top_k; ++k) {
          const std::int32_t id = p.expert[k];
          if (!zero_computation::is_one(p, id)) continue;
          const float share = zero_computation::share_of_token(p, k, id);
          weight = __fadd_rn(weight, __fmul_rn(p.weight[k], share));
          if (!zero_computation::is_constant(p, id)) continue;
          const float slope = params.slope[k];
          if (slope == 0.0F) continue;
          float first[kPack<T>], second[kPack<T>];
          load_floats(zero_computation::constant_row(p, id, 0) + at, first);
          load_floats(zero_computation::constant_row(p, id, 1) + at, second);
#pragma unroll
          for (int i = 0; i < kPack<T>; ++i) {
            sum[i] = fmaf(-slope, second[i], fmaf(slope, first[i], sum[i]));
          }
        }
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) sum[i] = fmaf(weight, dy[i], sum[i]);
        store_floats(params.out + place, sum);
      });
}

/// Four values of a row of T.
template <typename T>
__device__ __forceinline__ void load_four(const void* rows, std::int64_t at, float (&x)[4]) {
  const T* const from = static_cast<const T*>(rows) + at;
  if constexpr (sizeof(T) == 4) {
    load_floats(reinterpret_cast<const float*>(from), x);
  } else {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    float wide[kPack<T>];
    unpack16(int4{static_cast<int>(bits.x), static_cast<int>(bits.y), 0, 0}, wide, T{});
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = wide[i];
  }
}

/// The picks of one constant expert among a part's tokens, in shared memory, by k and then token.
/// @returns how many.
__device__ __forceinline__ int list_picks(const Picks& p, std::int32_t id, std::int64_t first_token,
                                          std::int32_t* list, int* of_warp) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t t = first_token + thread;
  int count = 0;
  for (std::int32_t k = 0; k < p.top_k; ++k) {
    const std::int64_t i = t * p.top_k + k;
    const bool hit = t < p.num_tokens && p.expert[i] == id && p.of_constant[i] != 0.0F;
    const unsigned votes = __ballot_sync(0xffffffffU, hit);
    if (thread % 32 == 0) of_warp[thread / 32] = __popc(votes);
    __syncthreads();
    int place = count + __popc(votes & ((1U << thread % 32) - 1));
    for (int w = 0; w < kConstantWarps; ++w) {
      if (w < thread / 32) place += of_warp[w];
      count += of_warp[w];
    }
    if (hit) list[place] = thread * p.top_k + k;
    __syncthreads();
  }
  return count;
}

/// A block: one constant expert, kConstantColumns columns, one part of the tokens.
template <typename T>
__global__ void __launch_bounds__(kTokenThreads) of_constants_kernel(const ConstantsParams params) {
  extern __shared__ std::int32_t list[];  // [kConstantTokens * K]
  __shared__ int of_warp[kConstantWarps];
  const Picks& p = params.picks;
  const auto c = static_cast<std::int32_t>(blockIdx.y);
  const std::int64_t part = blockIdx.z;
  const std::int64_t first_pick = part * kConstantTokens * p.top_k;
  const int count = list_picks(p, p.first + c, part * kConstantTokens, list, of_warp);
  const std::int64_t h = std::int64_t{blockIdx.x} * kConstantColumns + threadIdx.x * 4;
  if (h >= p.hidden) return;
  alignas(16) float of_logit[4] = {};
  alignas(16) float of_vector[4] = {};
  for (int n = 0; n < count; ++n) {
    const std::int64_t i = first_pick + list[n];
    const std::int64_t at = i / p.top_k * p.hidden + h;
    const float slope = params.slope[i];
    const float weight = p.weight[i] * p.of_constant[i];
    float x[4], dy[4];
    load_four<T>(params.tokens, at, x);
    load_four<T>(params.dout, at, dy);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      of_logit[j] = fmaf(slope, x[j], of_logit[j]);
      of_vector[j] = fmaf(weight, dy[j], of_vector[j]);
    }
  }
  float* const out = params.parts + ((part * params.num_constants + c) * 2) * p.hidden + h;
  store_floats(out, of_logit);
  store_floats(out + p.hidden, of_vector);
}

/// A thread: one column of W's two rows and of v of one constant expert.
__global__ void __launch_bounds__(kTokenThreads)
    add_constants_kernel(const ConstantsParams params) {
  const std::int64_t hidden = params.picks.hidden;
  const std::int64_t i = std::int64_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (i >= params.num_constants * hidden) return;
  const std::int64_t c = i / hidden;
  const std::int64_t h = i % hidden;
  float of_logit = 0.0F;
  float of_vector = 0.0F;
  for (std::int64_t part = 0; part < params.num_parts; ++part) {
    const float* const from = params.parts + ((part * params.num_constants + c) * 2) * hidden + h;
    of_logit += from[0];
    of_vector += from[hidden];
  }
  float* const out = params.out + c * 3 * hidden + h;
  const bool add = params.accumulate;
  out[0] = add ? out[0] + of_logit : of_logit;
  out[hidden] = add ? out[hidden] - of_logit : -of_logit;
  out[2 * hidden] = add ? out[2 * hidden] + of_vector : of_vector;
}

std::int64_t parts_for(std::int64_t num_tokens) {
  return (num_tokens + kConstantTokens - 1) / kConstantTokens;
}

}  // namespace

void CudaZeroComputation::reserve_backward(std::int64_t num_tokens) {
  if (free_.constant == 0) return;
  (void)slope_.matrix<float>(num_tokens, top_k_);
  (void)parts_.matrix<float>(parts_for(num_tokens) * free_.constant * 2, hidden_);
}

void CudaZeroComputation::backward(const ChosenTokens& chosen, const ZeroComputationBackward& args,
                                   const Execution& execution) {
  const ConstRawMatrix& tokens = chosen.x;
  const bool constants = free_.constant > 0 && (args.dtokens || args.dconstant.data != nullptr);
  if (tokens.rows > 0 && (constants || args.dweight.data != nullptr)) {
    const ScopedStage stage(execution, "shared",
                            {.bytes = 2 * static_cast<double>(tokens.bytes())});
    const WeightsParams params{
        .picks = picks(chosen),
        .tokens = tokens.data,
        .dout = args.dout.data,
        .dweight = args.dweight.data,
        .slope = constants ? slope_.matrix<float>(tokens.rows, top_k_).data : nullptr};
    with_token_type(tokens.dtype, [&]<typename T>(T) {
      of_picks_kernel<T>
          <<<token_blocks(32 * tokens.rows), kTokenThreads, 0, stream_of_call(execution)>>>(params);
    });
  }
  if (args.dconstant.data != nullptr) add_up_constants(chosen, args, execution);
}

void CudaZeroComputation::add_up_constants(const ChosenTokens& chosen,
                                           const ZeroComputationBackward& args,
                                           const Execution& execution) {
  const ConstRawMatrix& tokens = chosen.x;
  const std::int64_t parts = parts_for(tokens.rows);
  constexpr std::int64_t kMostParts = 65535;
  if (parts > kMostParts) {
    fail(ErrorCode::kUnsupported,
         "gradients of constant experts on CUDA: {} tokens, want at most {}", tokens.rows,
         kMostParts * kConstantTokens);
  }
  const ScopedStage stage(execution, "shared", {.bytes = 2 * static_cast<double>(tokens.bytes())});
  const ConstantsParams params{
      .picks = picks(chosen),
      .tokens = tokens.data,
      .dout = args.dout.data,
      .slope = slope_.matrix<float>(tokens.rows, top_k_).data,
      .parts = parts_.matrix<float>(parts * free_.constant * 2, hidden_).data,
      .out = args.dconstant.data,
      .num_parts = parts,
      .num_constants = free_.constant,
      .accumulate = args.accumulate};
  cudaStream_t stream = stream_of_call(execution);
  const dim3 blocks(static_cast<unsigned>((hidden_ + kConstantColumns - 1) / kConstantColumns),
                    static_cast<unsigned>(free_.constant), static_cast<unsigned>(parts));
  const std::size_t list =
      sizeof(std::int32_t) * kConstantTokens * static_cast<std::size_t>(top_k_);
  with_token_type(tokens.dtype, [&]<typename T>(T) {
    if (parts > 0) of_constants_kernel<T><<<blocks, kTokenThreads, list, stream>>>(params);
    const std::int64_t columns = free_.constant * hidden_;
    add_constants_kernel<<<static_cast<unsigned>((columns + kTokenThreads - 1) / kTokenThreads),
                           kTokenThreads, 0, stream>>>(params);
  });
}

void CudaZeroComputation::tokens_backward(const ChosenTokens& chosen, ConstRawMatrix dout,
                                          Matrix<const float> rest, Matrix<float> dtokens,
                                          const Execution& execution) {
  if (dout.rows == 0) return;
  const ScopedStage stage(
      execution, "shared",
      {.bytes = static_cast<double>(dout.bytes()) + 8 * static_cast<double>(dtokens.size())});
  const TokensParams params{
      .picks = picks(chosen),
      .dout = dout.data,
      .slope = free_.constant > 0 ? slope_.matrix<float>(dout.rows, top_k_).data : nullptr,
      .rest = rest.data,
      .out = dtokens.data};
  with_token_type(dout.dtype, [&]<typename T>(T) {
    of_tokens_kernel<T><<<token_blocks(zero_computation::threads_for_pieces(dout)), kTokenThreads,
                          0, stream_of_call(execution)>>>(params);
  });
}

}  // namespace switchyard
