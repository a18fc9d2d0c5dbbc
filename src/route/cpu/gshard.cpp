// GShard's top-2 on a CPU: the best expert, and a second one that may be drawn and may be left out.
// Bound by reading the logits.
#include "route/cpu/all_probabilities.hpp"
#include "route/cpu/tokens.hpp"
#include "route/draws.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

/// Who is first and second; the backward makes it again, since the second counts in the weight of
/// the first where it was left out itself.
class TopTwo {
 public:
  TopTwo(const RouterConfig& config, const RouteRequest& request)
      : num_experts_(config.num_experts),
        router_(std::get<GShardRouter>(config.kind)),
        training_(request.training),
        gumbel_(request, Draws::For::kSecond),
        keep_(request, Draws::For::kKeepSecond) {}

  struct Choice {
    std::int32_t first = 0;
    std::int32_t second = 1;
    float weight[2] = {};  ///< Softmax over both logits.
    bool keeps_second = true;
  };

  Choice operator()(const float* logits, std::int64_t token) const {
    Choice choice;
    for (std::int32_t e = 1; e < num_experts_; ++e) {
      if (logits[e] > logits[choice.first]) choice.first = e;
    }
    choice.second = choice.first == 0 ? 1 : 0;
    float best = score(logits, token, choice.second);
    for (std::int32_t e = choice.second + 1; e < num_experts_; ++e) {
      if (e == choice.first) continue;
      const float other = score(logits, token, e);
      if (!(other > best)) continue;
      best = other;
      choice.second = e;
    }
    const float ratio = exp_below(logits[choice.second], logits[choice.first]);
    choice.weight[0] = 1.0F / (1.0F + ratio);
    choice.weight[1] = ratio / (1.0F + ratio);
    choice.keeps_second = keeps(choice.weight[1], token);
    return choice;
  }

 private:
  [[nodiscard]] float score(const float* logits, std::int64_t token, std::int32_t expert) const {
    if (!router_.sampled || !training_) return logits[expert];
    return logits[expert] + gumbel_of(gumbel_.unit(token, static_cast<std::uint32_t>(expert)));
  }

  [[nodiscard]] bool keeps(float weight, std::int64_t token) const {
    switch (router_.second) {
      case GShardRouter::Second::kThreshold: return weight > router_.threshold;
      case GShardRouter::Second::kRandom:
        return !training_ || weight > router_.threshold * keep_.unit(token, 0);
      default: return true;
    }
  }

  std::int32_t num_experts_;
  const GShardRouter& router_;
  bool training_;
  Draws gumbel_, keep_;
};

void run(const RouteArgs& args) {
  const TopTwo top_two(args.config, args.request);
  routing::LowestNan nan(args.config.num_experts);
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] {
    return [&](std::int64_t token) {
      const float* logits = args.logits.row(token);
      const std::int32_t e = routing::nan_among(logits, args.config.num_experts);
      if (e >= 0) return nan.report(token, e);
      const TopTwo::Choice choice = top_two(logits, token);
      std::int32_t* expert = args.routing.expert.row(token);
      float* weight = args.routing.weight.row(token);
      expert[0] = choice.first;
      weight[0] = choice.weight[0];
      expert[1] = choice.keeps_second ? choice.second : -1;
      weight[1] = choice.keeps_second ? choice.weight[1] : 0.0F;
    };
  });
  nan.require_none();
}

/// w0 = 1 / (1 + exp(l1 - l0)) = 1 - w1, so both logits get +-w0 w1 (g0 - g1).
void run_backward(const RouteBackwardArgs& args) {
  const TopTwo top_two(args.config, args.request);
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] {
    return [&](std::int64_t token) {
      const TopTwo::Choice choice = top_two(args.logits.row(token), token);
      const std::int32_t* expert = args.expert.row(token);
      const float* dweight = args.dweight.row(token);
      float* dlogits = args.dlogits.row(token);
      if (!args.accumulate) std::fill_n(dlogits, args.config.num_experts, 0.0F);
      const float first = expert[0] < 0 ? 0.0F : dweight[0];
      const float second = expert[1] < 0 ? 0.0F : dweight[1];
      const float slope = choice.weight[0] * choice.weight[1] * (first - second);
      dlogits[choice.first] += slope;
      dlogits[choice.second] -= slope;
    };
  });
  routing::add_losses(args);
}

}  // namespace

const Implementation<RouteArgs> kRouteCpuGShard{"cpu.gshard", reject_but<GShardRouter, RouteArgs>,
                                                run};
const Implementation<RouteBackwardArgs> kRouteBackwardCpuGShard{
    "cpu.gshard", reject_but<GShardRouter, RouteBackwardArgs>, run_backward};

}  // namespace switchyard
