// Through the weights of the chosen experts to the logits on a GPU: a warp a token, lane k has the
// k-th choice, and what is said of all experts goes along the row. Bound by memory: the row is read
// once from there, and dlogits written once.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/route_kernel.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;
using Lane = Lanes<32>;

constexpr int kThreads = 128;
constexpr int kMaxTopK = 32;

struct RouteBackwardParams {
  const float* logits;         // [T, E]
  const std::int32_t* expert;  // [T, K]
  const float* dweight;        // [T, K]
  float* dlogits;              // [T, E]
  DeviceStatus* status;        // or null
  std::int64_t num_tokens;
  TopKRule config;
  bool accumulate;
};

/// A lane's choice of the token.
struct Choice {
  bool used;
  int expert;
  float logit;
  float gradient;  ///< Of its weight before the scale.
};

__device__ __forceinline__ Choice load_choice(const RouteBackwardParams& p, std::int64_t token,
                                              const float* logits, int lane) {
  const bool mine = lane < p.config.top_k;
  const std::int64_t at = token * p.config.top_k + lane;
  const int expert = mine ? p.expert[at] : -1;
  const bool used = expert >= 0 && expert < p.config.num_experts;
  if (mine && !used && expert != -1 && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
  return {.used = used,
          .expert = expert,
          .logit = used ? logits[expert] : 0.0F,
          .gradient = used ? p.config.scale * p.dweight[at] : 0.0F};
}

/// dlogits of the chosen by shares of the chosen: a softmax, or sigmoids over their sum.
__device__ __forceinline__ float through_chosen(const RouteBackwardParams& p, const Choice& c) {
  const bool sigmoids = p.config.score == Score::kSigmoid;
  const float largest = Lane::max(c.used ? c.logit : kMinusInf);
  // Where all sigmoids underflow they are exponentials, as in the forward.
  const bool exponentials = !sigmoids || sigmoid(largest) < 1.17549435e-38F;
  float share = 0.0F;
  if (c.used) share = exponentials ? exp_below(c.logit, largest) : sigmoid(c.logit);
  share /= Lane::sum(share);
  const float mean = Lane::sum(c.used ? c.gradient * share : 0.0F);
  const float slope = sigmoids ? 1.0F - sigmoid(c.logit) : 1.0F;
  return share * slope * (c.gradient - mean);
}

/// Writes what a softmax over all experts gives those that were not chosen, and returns what it
/// gives the lane's choice besides.
__device__ __forceinline__ float through_all(const RouteBackwardParams& p, const Choice& c,
                                             const float* logits, float* dlogits, int lane) {
  const int num_experts = p.config.num_experts;
  float largest = kMinusInf;
  for (int e = lane; e < num_experts; e += 32) largest = fmaxf(largest, logits[e]);
  largest = Lane::max(largest);
  float sum = 0.0F;
  for (int e = lane; e < num_experts; e += 32) sum += exp_below(logits[e], largest);
  sum = Lane::sum(sum);
  const float share = c.used ? exp_below(c.logit, largest) / sum : 0.0F;
  const float mean = Lane::sum(c.gradient * share);
  for (int e = lane; e < num_experts; e += 32) {
    const float part = -(exp_below(logits[e], largest) / sum * mean);
    dlogits[e] = p.accumulate ? dlogits[e] + part : part;
  }
  return share * c.gradient;
}

__global__ void __launch_bounds__(kThreads)
    route_backward_kernel(const __grid_constant__ RouteBackwardParams p) {
  const int lane = Lane::lane();
  const std::int64_t token =
      std::int64_t{blockIdx.x} * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (token >= p.num_tokens) return;
  const int num_experts = p.config.num_experts;
  const float* const logits = p.logits + token * num_experts;
  float* const dlogits = p.dlogits + token * num_experts;
  const Choice c = load_choice(p, token, logits, lane);
  float gradient = 0.0F;
  if (p.config.score == Score::kSoftmax && !p.config.renormalize) {
    gradient = through_all(p, c, logits, dlogits, lane);
  } else {
    if (!p.accumulate) {
      for (int e = lane; e < num_experts; e += 32) dlogits[e] = 0.0F;
    }
    if (p.config.score == Score::kSigmoid && !p.config.renormalize) {
      const float s = sigmoid(c.logit);
      gradient = c.gradient * s * (1.0F - s);
    } else {
      gradient = through_chosen(p, c);
    }
  }
  __syncwarp();  // the chosen's places may be another lane's
  if (c.used) dlogits[c.expert] += gradient;
}

std::optional<std::string> reject(const RouteBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (auto reason = reject_other_than_top_k(args.config)) return reason;
  if (args.config.as_top_k().score == Score::kSparseMixer) return "no score sparse-mixer";
  if (args.config.top_k() > kMaxTopK) return "top_k exceeds 32";
  if (args.losses.score.data != nullptr) return "losses have a kernel of their own";
  return std::nullopt;
}

void run(const RouteBackwardArgs& args) {
  const std::int64_t num_tokens = args.logits.shape[0];
  if (num_tokens == 0) return;
  const RouteBackwardParams params{.logits = args.logits.data,
                                   .expert = args.expert.data,
                                   .dweight = args.dweight.data,
                                   .dlogits = args.dlogits.data,
                                   .status = args.execution.status,
                                   .num_tokens = num_tokens,
                                   .config = rule_of(args.config),
                                   .accumulate = args.accumulate};
  constexpr std::int64_t kTokens = kThreads / 32;
  const auto blocks = static_cast<unsigned>((num_tokens + kTokens - 1) / kTokens);
  route_backward_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(
      params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<RouteBackwardArgs> kRouteBackwardCudaWarp{"cuda.warp", reject, run};

}  // namespace switchyard
