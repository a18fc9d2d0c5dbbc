// What zero-computation experts give to a rank's tokens, and the routing without them.
#include "layer/gpu/router/router.hpp"
#include "layer/gpu/zero_computation/picks.cuh"
#include "layer/gpu/zero_computation/zero_computation.hpp"

namespace switchyard {
namespace {

using zero_computation::Picks;

struct AroundParams {
  Picks picks;
  const void* tokens;    // [T, H]
  const float* shared;   // [T, H] or null
  std::int32_t* others;  // [T, K]
  float* out;            // [T, H] or null
};

/// a1 and a2 of each pick, a warp a token.
template <typename T>
__global__ void __launch_bounds__(kTokenThreads)
    weigh_constants_kernel(const Picks p, const void* tokens) {
  zero_computation::for_each_token(p.num_tokens, [&](std::int64_t t) {
    for (std::int64_t i = t * p.top_k; i < (t + 1) * p.top_k; ++i) {
      const std::int32_t id = p.expert[i];
      float of_token = 0.0F;
      float of_constant = 0.0F;
      if (zero_computation::is_constant(p, id) && zero_computation::is_kept(p, i)) {
        const std::int64_t at = t * p.hidden;
        const float more = zero_computation::product_with<T>(
                               zero_computation::constant_row(p, id, 0), tokens, at, p.hidden) -
                           zero_computation::product_with<T>(
                               zero_computation::constant_row(p, id, 1), tokens, at, p.hidden);
        of_token = 1.0F / (1.0F + expf(-more));
        of_constant = 1.0F / (1.0F + expf(more));
      }
      if (threadIdx.x % 32 == 0) {
        p.of_token[i] = of_token;
        p.of_constant[i] = of_constant;
      }
    }
  });
}

template <typename T>
__device__ __forceinline__ void around_piece(const AroundParams& params, std::int64_t t,
                                             std::int64_t at, std::int64_t piece) {
  const Picks& p = params.picks;
  const std::int64_t first = t * p.top_k;
  float weight = 0.0F;
  for (std::int64_t i = first; i < first + p.top_k; ++i) {
    const std::int32_t id = p.expert[i];
    if (!zero_computation::is_one(p, id)) continue;
    weight = __fadd_rn(weight, __fmul_rn(p.weight[i], zero_computation::share_of_token(p, i, id)));
  }
  if (piece == 0) {
    for (std::int64_t i = first + threadIdx.x % 32; i < first + p.top_k; i += 32) {
      params.others[i] = zero_computation::is_one(p, p.expert[i]) ? -1 : p.expert[i];
    }
  }
  if (at >= p.hidden || params.out == nullptr) return;
  const std::int64_t place = t * p.hidden + at;
  float x[kPack<T>];
  load_token_values<T>(params.tokens, place, x);
  alignas(16) float sum[kPack<T>] = {};
  if (params.shared != nullptr) load_floats(params.shared + place, sum);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
  for (std::int64_t k = first; p.of_constant != nullptr && k < first + p.top_k; ++k) {
    const float share = p.of_constant[k];
    if (share == 0.0F) continue;
    float v[kPack<T>];
    load_floats(zero_computation::constant_row(p, p.expert[k], 2) + at, v);
    const float count = p.weight[k] * share;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sum[i] = fmaf(count, v[i], sum[i]);
  }
  store_floats(params.out + place, sum);
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads) around_kernel(const AroundParams p) {
  zero_computation::for_each_piece<T>(p.picks.num_tokens, p.picks.hidden,
                                      [&](std::int64_t t, std::int64_t at, std::int64_t piece) {
                                        around_piece<T>(p, t, at, piece);
                                      });
}

void require_token_pieces(ConstRawMatrix tokens) {
  if (tokens.row_bytes() % 16 == 0 && is_aligned_16(tokens.data)) return;
  fail(ErrorCode::kUnsupported,
       "zero-computation experts on CUDA: tokens of {} bytes want multiples of 16, at an address "
       "that is one",
       tokens.row_bytes());
}

}  // namespace

CudaZeroComputation::CudaZeroComputation(const LayerModel& model)
    : free_(model.config.router.zero_computation),
      first_(model.config.router.num_computing()),
      top_k_(model.config.router.top_k()),
      hidden_(model.config.experts.hidden),
      constants_(model.constant_experts) {
  if (constants_.empty()) return;
  if (constants_.where() == Backend::kCpu) {
    upload(constants_.widened(), uploaded_);
    constants_ = {uploaded_.data(), DType::kF32, constants_.size(), Backend::kCuda};
  }
  require(is_aligned_16(constants_.data()), "constant_experts is not aligned to 16 bytes");
}

void CudaZeroComputation::reserve(std::int64_t num_tokens) {
  if (!any()) return;
  (void)others_.matrix<std::int32_t>(num_tokens, top_k_);
  (void)around_.matrix<float>(num_tokens, hidden_);
  if (free_.constant == 0) return;
  (void)of_token_.matrix<float>(num_tokens, top_k_);
  (void)of_constant_.matrix<float>(num_tokens, top_k_);
}

Picks CudaZeroComputation::picks(const ChosenTokens& chosen) {
  const std::int64_t num_tokens = chosen.x.rows;
  const bool constants = free_.constant > 0;
  const auto of = [&](DeviceBuffer& buffer) {
    return constants ? buffer.matrix<float>(num_tokens, top_k_).data : nullptr;
  };
  const std::int32_t first_copy = first_ + free_.constant;
  const std::int32_t first_zero = first_copy + free_.copy;
  return {.expert = chosen.routing.expert.data,
          .weight = chosen.routing.weight.data,
          .kept = chosen.kept.data,
          .constants = constants ? constants_.vector().data : nullptr,
          .of_token = of(of_token_),
          .of_constant = of(of_constant_),
          .num_tokens = num_tokens,
          .hidden = hidden_,
          .top_k = top_k_,
          .first = first_,
          .first_copy = first_copy,
          .first_zero = first_zero,
          .end = first_zero + free_.zero};
}

Matrix<std::int32_t> CudaZeroComputation::without(const ChosenTokens& chosen,
                                                  const Execution& execution) {
  return leave_out(chosen, {}, nullptr, execution);
}

Matrix<std::int32_t> CudaZeroComputation::without(const ChosenTokens& chosen,
                                                  Matrix<const float> shared,
                                                  Matrix<const float>& around,
                                                  const Execution& execution) {
  const Matrix<float> out = around_.matrix<float>(chosen.x.rows, hidden_);
  around = out;
  return leave_out(chosen, shared, out.data, execution);
}

/// @param around  Or null.
Matrix<std::int32_t> CudaZeroComputation::leave_out(const ChosenTokens& chosen,
                                                    Matrix<const float> shared, float* around,
                                                    const Execution& execution) {
  const ConstRawMatrix& tokens = chosen.x;
  require_token_pieces(tokens);
  const Matrix<std::int32_t> others = others_.matrix<std::int32_t>(tokens.rows, top_k_);
  const double written = around == nullptr ? 0 : static_cast<double>(tokens.rows * hidden_);
  const ScopedStage stage(execution, "shared",
                          {.bytes = static_cast<double>(tokens.bytes()) + 4 * written});
  const AroundParams params{.picks = picks(chosen),
                            .tokens = tokens.data,
                            .shared = shared.data,
                            .others = others.data,
                            .out = around};
  cudaStream_t stream = stream_of_call(execution);
  with_token_type(tokens.dtype, [&]<typename T>(T) {
    if (free_.constant > 0) {
      weigh_constants_kernel<T>
          <<<token_blocks(32 * tokens.rows), kTokenThreads, 0, stream>>>(params.picks, tokens.data);
    }
    around_kernel<T>
        <<<token_blocks(zero_computation::threads_for_pieces(tokens)), kTokenThreads, 0, stream>>>(
            params);
  });
  return others;
}

}  // namespace switchyard
