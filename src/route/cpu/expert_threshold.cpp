// Experts that take what is above their thresholds, on a CPU. Bound by the exponentials.
#include <vector>

#include "route/cpu/all_probabilities.hpp"
#include "route/cpu/tokens.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

void run(const RouteArgs& args) {
  const std::int32_t num_experts = args.config.num_experts;
  std::vector<float> bias(static_cast<std::size_t>(num_experts),
                          -1.0F / static_cast<float>(num_experts));
  for (std::int32_t e = 0; e < num_experts && args.selection_bias.data != nullptr; ++e) {
    bias[static_cast<std::size_t>(e)] = args.selection_bias[e];
    require(std::isfinite(args.selection_bias[e]), "selection_bias[{}]={} is not finite", e,
            args.selection_bias[e]);
  }
  routing::LowestNan lowest(num_experts);
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] {
    return [&, probability = std::vector<float>(bias.size())](std::int64_t token) mutable {
      const float* logits = args.logits.row(token);
      const std::int32_t nan = routing::nan_among(logits, num_experts);
      if (nan >= 0) return lowest.report(token, nan);
      routing::softmax(logits, num_experts, probability.data());
      std::int32_t* expert = args.routing.expert.row(token);
      float* weight = args.routing.weight.row(token);
      std::int32_t used = 0;
      for (std::int32_t e = 0; e < num_experts; ++e) {
        const auto i = static_cast<std::size_t>(e);
        if (!(probability[i] + bias[i] > 0.0F)) continue;
        expert[used] = e;
        weight[used++] = probability[i];
      }
      std::fill(expert + used, expert + num_experts, -1);
      std::fill(weight + used, weight + num_experts, 0.0F);
    };
  });
  lowest.require_none();
}

}  // namespace

const Implementation<RouteArgs> kRouteCpuExpertThreshold{
    "cpu.expert-threshold", reject_but<ExpertThresholdRouter, RouteArgs>, run};
const Implementation<RouteBackwardArgs> kRouteBackwardCpuExpertThreshold{
    "cpu.expert-threshold", reject_but<ExpertThresholdRouter, RouteBackwardArgs>,
    routing::all_probabilities_backward};

}  // namespace switchyard
