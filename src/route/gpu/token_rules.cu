// Rules of one token's logits on a GPU that are not top-k: a warp a token. Bound by instructions:
// of choices in order each is one pass over the row and two maxima over the lanes.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/ranked_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kWarps = 4;
constexpr int kMaxTopK = 32;

struct TokenRuleParams {
  const float* logits;          // [T, logits]
  const float* selection_bias;  // [E] or null
  std::int32_t* expert;         // [T, columns]
  float* weight;                // [T, columns]
  DeviceStatus* status;         // or null
  std::int64_t num_tokens;
  std::int32_t num_experts, num_logits, columns;
  float threshold;  // of top-p
  TopTwoRule top_two;
};

struct GShard {
  static __device__ __forceinline__ void route(const TokenRuleParams& p, const RankedRow& row,
                                               std::int64_t token, const RowPlaces& to) {
    const TopTwoRule::Choice choice = p.top_two.choose(row, token);
    if (Warp::lane() != 0) return;
    to.put(0, choice.first, choice.weight[0]);
    to.put(1, choice.keeps_second ? choice.second : -1,
           choice.keeps_second ? choice.weight[1] : 0.0F);
  }
};

/// Lane k has the k-th choice among experts and null experts.
struct AdaMoe {
  static __device__ __forceinline__ void route(const TokenRuleParams& p, const RankedRow& row,
                                               std::int64_t /*token*/, const RowPlaces& to) {
    int mine = p.num_experts;
    RankedRow::Place at = RankedRow::top();
    for (int k = 0; k < to.columns; ++k) {
      at = row.after(at);
      if (Warp::lane() == k) mine = at.expert;
    }
    const bool used = mine < p.num_experts;
    const unsigned all = __ballot_sync(kAll, used);
    const float logit = used ? row.x[mine] : kMinusInf;
    const float largest = Warp::from(logit, max(0, __ffs(static_cast<int>(all)) - 1));
    const float power = used ? exp_below(logit, largest) : 0.0F;
    const float sum = Warp::sum(power);
    if (used) to.put(__popc(all & lanes_before()), mine, power / sum);
    to.leave(__popc(all));
  }
};

struct TopP {
  static __device__ __forceinline__ void route(const TokenRuleParams& p, const RankedRow& row,
                                               std::int64_t /*token*/, const RowPlaces& to) {
    const Probabilities probability(row);
    RankedRow::Place at = RankedRow::top();
    float sum = 0.0F;
    int used = 0;
    while (used < to.columns) {
      at = row.after(at);  // by logits, which do not tie where probabilities underflow
      const float share = probability.of(at.expert);
      if (Warp::lane() == 0) to.put(used, at.expert, share);
      ++used;
      sum += share;
      if (p.threshold < 1.0F && sum > p.threshold) break;
    }
    to.leave(used);
  }
};

/// All experts whose weight_of(e, weight) says so, in ascending order.
template <typename WeightOf>
__device__ __forceinline__ void take_all(const RankedRow& row, const RowPlaces& to,
                                         const WeightOf& weight_of) {
  int used = 0;
  for (int first = 0; first < row.size; first += 32) {
    const int e = first + Warp::lane();
    float weight = 0.0F;
    const bool is = e < row.size && weight_of(e, weight);
    const unsigned all = __ballot_sync(kAll, is);
    if (is) to.put(used + __popc(all & lanes_before()), e, weight);
    used += __popc(all);
  }
  to.leave(used);
}

struct Relu {
  static __device__ __forceinline__ void route(const TokenRuleParams& /*p*/, const RankedRow& row,
                                               std::int64_t /*token*/, const RowPlaces& to) {
    take_all(row, to, [&](int e, float& weight) { return (weight = row.x[e]) > 0.0F; });
  }
};

struct ExpertThreshold {
  static __device__ __forceinline__ void route(const TokenRuleParams& p, const RankedRow& row,
                                               std::int64_t /*token*/, const RowPlaces& to) {
    const Probabilities probability(row);
    const float same = -1.0F / static_cast<float>(p.num_experts);
    take_all(row, to, [&](int e, float& weight) {
      weight = probability.of(e);
      return weight + (p.selection_bias == nullptr ? same : p.selection_bias[e]) > 0.0F;
    });
  }
};

template <typename Rule>
__global__ void __launch_bounds__(kWarps * 32)
    token_rule_kernel(const __grid_constant__ TokenRuleParams p) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (token >= p.num_tokens) return;
  const RankedRow row{p.logits + token * p.num_logits, p.num_logits};
  const RowPlaces to{p.expert + token * p.columns, p.weight + token * p.columns, p.columns};
  const int nan = row.lowest_nan();
  if (nan == row.size) return Rule::route(p, row, token, to);
  to.leave(0);
  if (Warp::lane() == 0) report_nan(p.status, static_cast<int>(token), nan);
}

using TokenRuleKernel = void (*)(TokenRuleParams);

/// Null of another rule.
TokenRuleKernel kernel_of(const Router& router) {
  if (std::holds_alternative<GShardRouter>(router)) return token_rule_kernel<GShard>;
  if (std::holds_alternative<AdaMoeRouter>(router)) return token_rule_kernel<AdaMoe>;
  if (std::holds_alternative<TopPRouter>(router)) return token_rule_kernel<TopP>;
  if (std::holds_alternative<ReluRouter>(router)) return token_rule_kernel<Relu>;
  if (std::holds_alternative<ExpertThresholdRouter>(router)) {
    return token_rule_kernel<ExpertThreshold>;
  }
  return nullptr;
}

std::optional<std::string> reject(const RouteArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (kernel_of(args.config.kind) == nullptr) {
    return "is for gshard, adamoe, top-p, relu and expert-threshold";
  }
  const bool adamoe = std::holds_alternative<AdaMoeRouter>(args.config.kind);
  if (adamoe && args.config.top_k() > kMaxTopK) return "top_k exceeds 32";
  return std::nullopt;
}

void run(const RouteArgs& args) {
  const std::int64_t num_tokens = args.logits.shape[0];
  if (num_tokens == 0) return;
  const auto* gshard = std::get_if<GShardRouter>(&args.config.kind);
  const auto* top_p = std::get_if<TopPRouter>(&args.config.kind);
  const TokenRuleParams params{
      .logits = args.logits.data,
      .selection_bias = args.selection_bias.data,
      .expert = args.routing.expert.data,
      .weight = args.routing.weight.data,
      .status = args.execution.status,
      .num_tokens = num_tokens,
      .num_experts = args.config.num_experts,
      .num_logits = args.config.num_logits(),
      .columns = args.config.top_k(),
      .threshold = top_p == nullptr ? 0.0F : top_p->threshold,
      .top_two = top_two_rule(gshard == nullptr ? GShardRouter{} : *gshard, args.request)};
  const auto blocks = static_cast<unsigned>((num_tokens + kWarps - 1) / kWarps);
  const TokenRuleKernel kernel = kernel_of(args.config.kind);
  kernel<<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<RouteArgs> kRouteCudaTokenRules{"cuda.token_rules", reject, run};

}  // namespace switchyard
