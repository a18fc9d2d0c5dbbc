// AdaMoE's choice among experts and null experts on a CPU: top-k over all of them, then what is
// left of it. Bound by reading the logits.
#include "route/cpu/tokens.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

/// Moves the experts of a token before its null experts, which become unused places.
std::int32_t drop_nulls(std::int32_t* expert, std::int32_t top_k, std::int32_t num_experts) {
  std::int32_t* const end =
      std::remove_if(expert, expert + top_k, [&](std::int32_t e) { return e >= num_experts; });
  std::fill(end, expert + top_k, -1);
  return static_cast<std::int32_t>(end - expert);
}

void run(const RouteArgs& args) {
  RouteArgs all = args;
  all.config = among_all_logits(args.config);
  kRouteCpu.run(all);
  const std::int32_t top_k = args.config.top_k();
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] {
    return [&](std::int64_t token) {
      std::int32_t* expert = args.routing.expert.row(token);
      float* weight = args.routing.weight.row(token);
      const std::int32_t used = drop_nulls(expert, top_k, args.config.num_experts);
      std::fill(weight + used, weight + top_k, 0.0F);
      if (used == 0) return;
      const float* logits = args.logits.row(token);
      float sum = 0.0F;  // in descending order: the first is the largest
      for (std::int32_t k = 0; k < used; ++k) {
        sum += weight[k] = exp_below(logits[expert[k]], logits[expert[0]]);
      }
      for (std::int32_t k = 0; k < used; ++k) weight[k] /= sum;
    };
  });
}

/// Null experts have no weight: to those of the others it is a softmax over these.
void run_backward(const RouteBackwardArgs& args) {
  RouteBackwardArgs all = args;
  all.config = among_all_logits(args.config);
  kRouteBackwardCpu.run(all);
}

}  // namespace

const Implementation<RouteArgs> kRouteCpuAdaMoe{"cpu.adamoe", reject_but<AdaMoeRouter, RouteArgs>,
                                                run};
const Implementation<RouteBackwardArgs> kRouteBackwardCpuAdaMoe{
    "cpu.adamoe", reject_but<AdaMoeRouter, RouteBackwardArgs>, run_backward};

}  // namespace switchyard
