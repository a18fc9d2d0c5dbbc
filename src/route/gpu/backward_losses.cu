// As backward.cu, with the gradient of auxiliary losses in the same pass: lanes of a token hold its
// row of logits in registers, read it once and write dlogits once. What belongs to the chosen
// experts changes hands in shared memory. Bound by memory, and near it by instructions: so of many
// tokens a warp has several, which share those of sums over lanes.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/losses_backward.hpp"
#include "route/gpu/token_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kThreads = 128;
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
template <int kLanes>
__device__ __forceinline__ float through_chosen(const Params& p, bool used, float logit,
                                                float gradient) {
  using Lane = Lanes<kLanes>;
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

template <int kValues, int kLanes>
__global__ void __launch_bounds__(kThreads, kValues <= 8 ? 8 : 1)
    route_backward_losses_kernel(const __grid_constant__ Params p) {
  using Lane = Lanes<kLanes>;
  using Row = TokenRow<kValues, kLanes>;
  constexpr int kTokens = kThreads / kLanes;
  __shared__ __align__(16) float memory[kTokens][kValues * kLanes];
  const int lane = Lane::lane();
  const int place = static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t own = std::int64_t{blockIdx.x} * kTokens + place;
  // Lanes without a token go along with the last one and write nothing.
  const bool active = own < p.num_tokens;
  const std::int64_t token = active ? own : p.num_tokens - 1;
  const int num_experts = p.config.num_experts;
  const float* const logits = p.logits + token * num_experts;
  Row row;
  row.load(logits, num_experts);
  const bool mine = lane < p.config.top_k;
  const std::int64_t at = token * p.config.top_k + lane;
  const int expert = mine ? p.expert[at] : -1;
  const float dweight = mine ? p.dweight[at] : 0.0F;
  float* const of_experts = memory[place];
#pragma unroll
  for (int v = 0; v < kValues; ++v) of_experts[v * kLanes + lane] = 0.0F;
  const bool used = expert >= 0 && expert < num_experts;
  if (active && mine && !used && expert != -1 && p.status != nullptr) {
    atomicAdd(&p.status->bad_ids, 1U);
  }
  const float logit = used ? logits[expert] : 0.0F;

  const float largest = row.largest();
  float share[kValues];  // the softmax of the logits, or of sigmoids their shares
  float sum = row.sum_of(share, [&](float x) { return fast_exp_below(x, largest); });
  const float log_sum = __logf(sum);
  const float of_softmax = __fdividef(1.0F, sum);
  float reciprocal = of_softmax;
  // Where all sigmoids underflow their shares are the softmax.
  const bool sigmoids = p.config.score == Score::kSigmoid && sigmoid(largest) >= kSmallestNormal;
  if (__any_sync(kAll, sigmoids)) {
    float s[kValues];
    sum = row.sum_of(s, [](float x) { return sigmoid(x); });
    if (sigmoids) {
      reciprocal = 1.0F / sum;
#pragma unroll
      for (int v = 0; v < kValues; ++v) share[v] = s[v];
    }
  }

  // What the choices say goes to their experts' lanes: of a softmax over all as one more price.
  const float gradient = used ? p.config.scale * dweight : 0.0F;
  const bool over_all = p.config.score == Score::kSoftmax && !p.config.renormalize;
  const float from_choice = over_all ? gradient : through_chosen<kLanes>(p, used, logit, gradient);
  __syncwarp();
  if (used) of_experts[expert] = from_choice;
  __syncwarp();
  Row choice;
  choice.load(of_experts, num_experts);

  const std::int64_t group = p.per_group == p.num_tokens ? 0 : token / p.per_group;
  Row out;
  out.load(p.price + group * num_experts, num_experts);
  float mean = 0.0F;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    share[v] *= reciprocal;
    if (over_all) out.x[v] += choice.x[v];
    if (p.entropy != 0.0F && share[v] > 0.0F) {
      const float surprise = sigmoids ? -logf(share[v]) : log_sum - (row.x[v] - largest);
      out.x[v] += p.entropy * surprise;
    }
    if (row.has(v)) mean += share[v] * out.x[v];
  }
  mean = Lane::sum(mean);
  const float of_z = 2.0F * p.z * (largest + log_sum);
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    float value = share[v] * (out.x[v] - mean);
    float softmax = share[v];
    if (p.config.score == Score::kSigmoid) {
      value *= 1.0F - sigmoid(row.x[v]);
      softmax = fast_exp_below(row.x[v], largest) * of_softmax;
    }
    value += of_z * softmax;
    out.x[v] = over_all ? value : value + choice.x[v];
  }
  float* const dlogits = p.dlogits + token * num_experts;
  if (p.accumulate) {
    Row before;
    before.load(dlogits, num_experts);
#pragma unroll
    for (int v = 0; v < kValues; ++v) out.x[v] += before.x[v];
  }
  if (active) out.store(dlogits);
}

Params losses_params(const RouteBackwardArgs& args, const TopKRule& rule, bool accumulate) {
  return {.logits = args.logits.data,
          .expert = args.expert.data,
          .dweight = args.dweight.data,
          .price = args.losses.score.data,
          .dlogits = args.dlogits.data,
          .status = args.execution.status,
          .num_tokens = args.logits.shape[0],
          .per_group = args.logits.shape[0] / args.losses.score.shape[0],
          .z = args.losses.z,
          .entropy = args.losses.entropy,
          .config = rule,
          .accumulate = accumulate};
}

void launch(const Params& params, void* stream) {
  if (params.num_tokens == 0) return;
  for_row_width(params.num_tokens, params.config.num_experts, params.config.top_k,
                [&]<int kValues, int kLanes>() {
                  constexpr std::int64_t kTokens = kThreads / kLanes;
                  const auto blocks =
                      static_cast<unsigned>((params.num_tokens + kTokens - 1) / kTokens);
                  route_backward_losses_kernel<kValues, kLanes>
                      <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
                });
  SWITCHYARD_CUDA(cudaGetLastError());
}

std::optional<std::string> reject(const RouteBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.losses.score.data == nullptr) return "for losses";
  if (auto reason = reject_other_than_top_k(args.config)) return reason;
  if (args.config.as_top_k().score == Score::kSparseMixer) return "no score sparse-mixer";
  if (args.config.top_k() > kMaxTopK) return "top_k exceeds 32";
  return routing::reject_losses(args);
}

void run(const RouteBackwardArgs& args) {
  launch(losses_params(args, rule_of(args.config), args.accumulate), args.execution.stream);
}

}  // namespace

std::optional<std::string> routing::reject_losses(const RouteBackwardArgs& args) {
  if (args.logits.shape[1] > kMaxExperts) return "num_experts exceeds 1024";
  const bool aligned = is_aligned_16(args.logits.data) && is_aligned_16(args.dlogits.data) &&
                       is_aligned_16(args.losses.score.data);
  if (!aligned) return "a matrix is not aligned to 16 bytes";
  return std::nullopt;
}

void routing::add_losses_on_gpu(const RouteBackwardArgs& args) {
  // As of a choice of nobody.
  const TopKRule nobody{.num_experts = static_cast<std::int32_t>(args.logits.shape[1]),
                        .top_k = 0,
                        .score = Score::kSoftmax,
                        .renormalize = false,
                        .scale = 1.0F,
                        .groups = 1,
                        .top_groups = 1,
                        .group_score = GroupScore::kMax};
  launch(losses_params(args, nobody, true), args.execution.stream);
}

const Implementation<RouteBackwardArgs> kRouteBackwardCudaLosses{"cuda.losses", reject, run};

}  // namespace switchyard
