// Noise, choice and sums of a call of the router: in one pass where there is one, else in turn.
#include "route/implementations.hpp"

namespace switchyard {

void route_at_once(const RouteAtOnceArgs& args) {
  const RouteArgs& of = args.route;
  const bool noisy = args.noisy_logits.data != nullptr;
  const bool sums = args.sums.counts.data != nullptr;
  if (sums) {
    require(of.config.has_logits() && of.config.num_logits() == of.config.num_experts,
            "sums of the router {}: want one with as many logits as experts",
            rule_name(of.config.kind));
  }
  check_route(of);
  if (noisy) {
    require(of.config.noise.is_on_logits(),
            "noisy_logits are given to a router without noise on its logits");
    require(args.noisy_logits.data == of.logits.data && args.noisy_logits.shape == of.logits.shape,
            "noisy_logits are not the logits that are routed");
  }
  if (sums) check_sums(args.sums, of.logits.shape[0]);
  const NoiseArgs noise{.logits = args.noisy_logits,
                        .noise_logits = args.noise_logits,
                        .noise = of.config.noise,
                        .request = of.request,
                        .execution = of.execution};
  if (noisy) check_noise(noise);
#ifdef SWITCHYARD_WITH_CUDA
  if ((noisy || sums) && !kRouteAtOnceCuda.reject(args)) {
    tell_choice(of.execution, "route_at_once", kRouteAtOnceCuda.name, [&] {
      return fmt::format("{} tokens, {} of {} experts{}{}", of.logits.shape[0], of.config.top_k(),
                         of.config.num_experts, noisy ? ", noise" : "", sums ? ", sums" : "");
    });
    return kRouteAtOnceCuda.run(args);
  }
#endif
  if (noisy) add_noise(noise);
  route(of);
  if (!sums) return;
  routing_sums({.logits = of.logits,
                .assignments = DenseAssignments{.expert = of.routing.expert},
                .score = of.config.score(),
                .sums = args.sums,
                .execution = of.execution});
}

}  // namespace switchyard
