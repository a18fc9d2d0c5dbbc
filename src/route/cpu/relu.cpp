// The ReLU router on a CPU: an expert's weight is its logit where that is positive. Bound by
// memory.
#include "route/cpu/all_probabilities.hpp"
#include "route/cpu/tokens.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

void run(const RouteArgs& args) {
  const std::int32_t num_experts = args.config.num_experts;
  routing::LowestNan nan(num_experts);
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] {
    return [&](std::int64_t token) {
      const float* logits = args.logits.row(token);
      if (const std::int32_t e = routing::nan_among(logits, num_experts); e >= 0) {
        nan.report(token, e);
        return;
      }
      std::int32_t* expert = args.routing.expert.row(token);
      float* weight = args.routing.weight.row(token);
      std::fill_n(expert, num_experts, -1);
      std::fill_n(weight, num_experts, 0.0F);
      std::int32_t count = 0;
      for (std::int32_t e = 0; e < num_experts; ++e) {
        if (!(logits[e] > 0.0F)) continue;
        expert[count] = e;
        weight[count++] = logits[e];
      }
    };
  });
  nan.require_none();
}

void run_backward(const RouteBackwardArgs& args) {
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] {
    return [&](std::int64_t token) {
      const std::int32_t* expert = args.expert.row(token);
      const float* dweight = args.dweight.row(token);
      float* dlogits = args.dlogits.row(token);
      if (!args.accumulate) std::fill_n(dlogits, args.config.num_experts, 0.0F);
      for (std::int64_t k = 0; k < args.expert.shape[1]; ++k) {
        if (expert[k] >= 0) dlogits[expert[k]] += dweight[k];
      }
    };
  });
  routing::add_losses(args);
}

}  // namespace

const Implementation<RouteArgs> kRouteCpuRelu{"cpu.relu", reject_but<ReluRouter, RouteArgs>, run};
const Implementation<RouteBackwardArgs> kRouteBackwardCpuRelu{
    "cpu.relu", reject_but<ReluRouter, RouteBackwardArgs>, run_backward};

}  // namespace switchyard
