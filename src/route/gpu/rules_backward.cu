// Through the weights of rules that are not top-k to the logits on a GPU: a warp a token. Bound by
// memory: the row is read once from there, and dlogits written once.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/losses_backward.hpp"
#include "route/gpu/ranked_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kWarps = 4;

struct RuleBackwardParams {
  const float* logits;         // [T, E]
  const std::int32_t* expert;  // [T, columns]
  const float* dweight;        // [T, columns]
  float* dlogits;              // [T, E]
  DeviceStatus* status;        // or null
  std::int64_t num_tokens;
  std::int32_t num_experts, columns;
  TopTwoRule top_two;
  bool accumulate;
};

/// One token's choices.
struct Choices {
  const std::int32_t* expert;
  const float* dweight;

  /// visit(expert, gradient of its weight) of those that are used.
  template <typename Visit>
  __device__ __forceinline__ void for_used(const RuleBackwardParams& p, const Visit& visit) const {
    for (int k = Warp::lane(); k < p.columns; k += 32) {
      if (expert[k] >= 0 && expert[k] < p.num_experts) visit(expert[k], dweight[k]);
    }
  }
  __device__ __forceinline__ void report_bad(const RuleBackwardParams& p) const {
    if (p.status == nullptr) return;
    for (int k = Warp::lane(); k < p.columns; k += 32) {
      if (expert[k] < -1 || expert[k] >= p.num_experts) atomicAdd(&p.status->bad_ids, 1U);
    }
  }
};

/// dlogits = what before(e) says, or that is added; then all lanes may add to any of it.
template <typename Part>
__device__ __forceinline__ void write_all(const RuleBackwardParams& p, float* dlogits,
                                          const Part& part) {
  for (int e = Warp::lane(); e < p.num_experts; e += 32) {
    dlogits[e] = p.accumulate ? dlogits[e] + part(e) : part(e);
  }
  __syncwarp();
}

/// Weights that are probabilities over all experts: p_e (g_e - sum_k g_k p_k).
struct OfProbabilities {
  static __device__ __forceinline__ void back(const RuleBackwardParams& p, const RankedRow& row,
                                              std::int64_t /*token*/, const Choices& choices,
                                              float* dlogits) {
    const Probabilities probability(row);
    float mean = 0.0F;
    choices.for_used(p, [&](int e, float g) { mean = fmaf(g, probability.of(e), mean); });
    mean = Warp::sum(mean);
    write_all(p, dlogits, [&](int e) { return -(probability.of(e) * mean); });
    choices.for_used(p, [&](int e, float g) { dlogits[e] += probability.of(e) * g; });
  }
};

/// Weights that are logits.
struct OfLogits {
  static __device__ __forceinline__ void back(const RuleBackwardParams& p, const RankedRow& /*row*/,
                                              std::int64_t /*token*/, const Choices& choices,
                                              float* dlogits) {
    write_all(p, dlogits, [](int /*e*/) { return 0.0F; });
    choices.for_used(p, [&](int e, float g) { dlogits[e] += g; });
  }
};

/// w0 = 1 / (1 + exp(l1 - l0)) = 1 - w1, so both logits get +-w0 w1 (g0 - g1). The second is made
/// again, for it counts in the weight of the first where it was left out itself.
struct OfTopTwo {
  static __device__ __forceinline__ void back(const RuleBackwardParams& p, const RankedRow& row,
                                              std::int64_t token, const Choices& choices,
                                              float* dlogits) {
    const TopTwoRule::Choice choice = p.top_two.choose(row, token);
    write_all(p, dlogits, [](int /*e*/) { return 0.0F; });
    if (Warp::lane() != 0) return;
    const float first = choices.expert[0] < 0 ? 0.0F : choices.dweight[0];
    const float second = choices.expert[1] < 0 ? 0.0F : choices.dweight[1];
    const float slope = choice.weight[0] * choice.weight[1] * (first - second);
    dlogits[choice.first] += slope;
    dlogits[choice.second] -= slope;
  }
};

template <typename Rule>
__global__ void __launch_bounds__(kWarps * 32)
    rule_backward_kernel(const __grid_constant__ RuleBackwardParams p) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (token >= p.num_tokens) return;
  const RankedRow row{p.logits + token * p.num_experts, p.num_experts};
  const Choices choices{p.expert + token * p.columns, p.dweight + token * p.columns};
  choices.report_bad(p);
  Rule::back(p, row, token, choices, p.dlogits + token * p.num_experts);
}

using RuleBackwardKernel = void (*)(RuleBackwardParams);

/// Null of another rule.
RuleBackwardKernel kernel_of(const Router& router) {
  if (std::holds_alternative<GShardRouter>(router)) return rule_backward_kernel<OfTopTwo>;
  if (std::holds_alternative<ReluRouter>(router)) return rule_backward_kernel<OfLogits>;
  const bool probabilities = std::holds_alternative<TopPRouter>(router) ||
                             std::holds_alternative<ExpertChoiceRouter>(router) ||
                             std::holds_alternative<ExpertThresholdRouter>(router);
  return probabilities ? rule_backward_kernel<OfProbabilities> : nullptr;
}

/// Null experts have no weight: to those of the others it is a softmax over these.
RouteBackwardArgs among_all(const RouteBackwardArgs& args) {
  RouteBackwardArgs all = args;
  all.config = among_all_logits(args.config);
  return all;
}
const Implementation<RouteBackwardArgs>& of_top_k(const RouteBackwardArgs& args) {
  return args.losses.score.data != nullptr ? kRouteBackwardCudaLosses : kRouteBackwardCudaWarp;
}

std::optional<std::string> reject(const RouteBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (std::holds_alternative<AdaMoeRouter>(args.config.kind)) {
    return of_top_k(args).reject(among_all(args));
  }
  if (kernel_of(args.config.kind) == nullptr) return "is for rules of logits other than top-k";
  if (args.losses.score.data != nullptr) return reject_losses(args);
  return std::nullopt;
}

void run(const RouteBackwardArgs& args) {
  if (std::holds_alternative<AdaMoeRouter>(args.config.kind)) {
    return of_top_k(args).run(among_all(args));
  }
  const auto [num_tokens, num_experts] = args.logits.shape;
  if (num_tokens == 0) return;
  const auto* gshard = std::get_if<GShardRouter>(&args.config.kind);
  const RuleBackwardParams params{
      .logits = args.logits.data,
      .expert = args.expert.data,
      .dweight = args.dweight.data,
      .dlogits = args.dlogits.data,
      .status = args.execution.status,
      .num_tokens = num_tokens,
      .num_experts = static_cast<std::int32_t>(num_experts),
      .columns = static_cast<std::int32_t>(args.expert.shape[1]),
      .top_two = top_two_rule(gshard == nullptr ? GShardRouter{} : *gshard, args.request),
      .accumulate = args.accumulate};
  const auto blocks = static_cast<unsigned>((num_tokens + kWarps - 1) / kWarps);
  const RuleBackwardKernel kernel = kernel_of(args.config.kind);
  kernel<<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
  if (args.losses.score.data != nullptr) add_losses_on_gpu(args);
}

}  // namespace

const Implementation<RouteBackwardArgs> kRouteBackwardCudaRules{"cuda.rules", reject, run};

}  // namespace switchyard
