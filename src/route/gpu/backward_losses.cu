// As backward.cu, with the gradient of auxiliary losses in the same pass: a warp a token holds the
// row of logits in registers, reads it once and writes dlogits once. What belongs to the chosen
// experts changes hands in shared memory. Bound by memory.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/token_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;
using Lane = Lanes<32>;

constexpr int kWarps = 4;
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;

struct Params {
  const float* logits;         // [T, E]
  const std::int32_t* expert;  // [T, K]
  const float* dweight;        // [T, K]
  const float* price;          // [S, E]
  float* dlogits;              // [T, E]
  DeviceStatus* status;        // or null
  std::int64_t num_tokens;
  std::int64_t per_group;  // tokens
  float z, entropy;
  TopKRule config;
  bool accumulate;
};

/// What a choice says of its expert's logit by shares of the chosen, as backward.cu.
__device__ __forceinline__ float through_chosen(const Params& p, bool used, float logit,
                                                float gradient) {
  const bool sigmoids = p.config.score == Score::kSigmoid;
  if (sigmoids && !p.config.renormalize) {
    const float s = sigmoid(logit);
    return gradient * s * (1.0F - s);
  }
  const float largest = Lane::max(used ? logit : kMinusInf);
  const bool exponentials = !sigmoids || sigmoid(largest) < kSmallestNormal;
  float share = 0.0F;
  if (used) share = exponentials ? exp_below(logit, largest) : sigmoid(logit);
  share /= Lane::sum(share);
  const float mean = Lane::sum(used ? gradient * share : 0.0F);
  const float slope = sigmoids ? 1.0F - sigmoid(logit) : 1.0F;
  return share * slope * (gradient - mean);
}

template <int kValues>
__global__ void __launch_bounds__(kWarps * 32)
    route_backward_losses_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) float memory[kWarps][kValues * 32];
  const int lane = Lane::lane();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const of_experts = memory[warp];
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarps + warp;
  if (token >= p.num_tokens) return;
  const int num_experts = p.config.num_experts;
  TokenRow<kValues> row;
  row.load(p.logits + token * num_experts, num_experts);
  const bool mine = lane < p.config.top_k;
  const std::int64_t at = token * p.config.top_k + lane;
  const int expert = mine ? p.expert[at] : -1;
  const float dweight = mine ? p.dweight[at] : 0.0F;
  TokenRow<kValues> price;
  const std::int64_t group = p.per_group == p.num_tokens ? 0 : token / p.per_group;
  price.load(p.price + group * num_experts, num_experts);
  const bool used = expert >= 0 && expert < num_experts;
  if (mine && !used && expert != -1 && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);

    // The logits of the chosen go to the lanes of the choices.
#pragma unroll
  for (int v = 0; v < kValues; ++v) of_experts[lane * kValues + v] = row.x[v];
  __syncwarp();
  const float logit = used ? of_experts[expert] : 0.0F;
  __syncwarp();
#pragma unroll
  for (int v = 0; v < kValues; ++v) of_experts[lane * kValues + v] = 0.0F;
  __syncwarp();

  const float largest = row.largest();
  float q[kValues];  // the softmax of the logits
  const float sum = row.sum_of(q, [&](float x) { return exp_below(x, largest); });
  const float log_sum = logf(sum);
  const float reciprocal = 1.0F / sum;
#pragma unroll
  for (int v = 0; v < kValues; ++v) q[v] *= reciprocal;

  // And what the choices say comes back: of a softmax over all as one more price.
  const float gradient = used ? p.config.scale * dweight : 0.0F;
  const bool over_all = p.config.score == Score::kSoftmax && !p.config.renormalize;
  const float from_choice = over_all ? gradient : through_chosen(p, used, logit, gradient);
  if (used) of_experts[expert] = from_choice;
  __syncwarp();
  float choice[kValues];
#pragma unroll
  for (int v = 0; v < kValues; ++v) choice[v] = of_experts[lane * kValues + v];

  // Where all sigmoids underflow their shares are the softmax.
  const bool sigmoids = p.config.score == Score::kSigmoid && sigmoid(largest) >= kSmallestNormal;
  float s[kValues];
  float share_of_sum = 0.0F;
  if (sigmoids) share_of_sum = 1.0F / row.sum_of(s, [](float x) { return sigmoid(x); });
  float value[kValues];
  float mean = 0.0F;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    const float share = sigmoids ? s[v] * share_of_sum : q[v];
    value[v] = price.x[v] + (over_all ? choice[v] : 0.0F);
    if (p.entropy != 0.0F && share > 0.0F) {
      const float surprise = sigmoids ? -logf(share) : log_sum - (row.x[v] - largest);
      value[v] += p.entropy * surprise;
    }
    if (v < row.count) mean += share * value[v];
  }
  mean = Lane::sum(mean);
  const float of_z = 2.0F * p.z * (largest + log_sum);
  float* const out = p.dlogits + token * num_experts;
  TokenRow<kValues> before;
  if (p.accumulate) before.load(out, num_experts);
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    const float share = sigmoids ? s[v] * share_of_sum : q[v];
    const float slope = p.config.score == Score::kSigmoid ? 1.0F - sigmoid(row.x[v]) : 1.0F;
    value[v] = share * slope * (value[v] - mean) + of_z * q[v];
    if (!over_all) value[v] += choice[v];
    if (p.accumulate) value[v] += before.x[v];
  }
  row.store(value, out, num_experts);
}

std::optional<std::string> reject(const RouteBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.losses.score.data == nullptr) return "for losses";
  if (args.config.as_top_k().score == Score::kSparseMixer) return "no score sparse-mixer";
  if (args.config.top_k() > kMaxTopK) return "top_k exceeds 32";
  if (args.config.num_experts > kMaxExperts) return "num_experts exceeds 1024";
  const bool aligned = is_aligned_16(args.logits.data) && is_aligned_16(args.dlogits.data) &&
                       is_aligned_16(args.losses.score.data);
  if (!aligned) return "a matrix is not aligned to 16 bytes";
  return std::nullopt;
}

void run(const RouteBackwardArgs& args) {
  const std::int64_t num_tokens = args.logits.shape[0];
  if (num_tokens == 0) return;
  const Params params{.logits = args.logits.data,
                      .expert = args.expert.data,
                      .dweight = args.dweight.data,
                      .price = args.losses.score.data,
                      .dlogits = args.dlogits.data,
                      .status = args.execution.status,
                      .num_tokens = num_tokens,
                      .per_group = num_tokens / args.losses.score.shape[0],
                      .z = args.losses.z,
                      .entropy = args.losses.entropy,
                      .config = rule_of(args.config),
                      .accumulate = args.accumulate};
  const auto blocks = static_cast<unsigned>((num_tokens + kWarps - 1) / kWarps);
  for_row_width(args.config.num_experts, [&]<int kValues>() {
    route_backward_losses_kernel<kValues>
        <<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(params);
  });
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<RouteBackwardArgs> kRouteBackwardCudaLosses{"cuda.losses", reject, run};

}  // namespace switchyard
