#pragma once

#include "core/select.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/losses.hpp"
#include "switchyard/route.hpp"

namespace switchyard {

extern const Implementation<RouteArgs> kRouteCpu;
extern const Implementation<RouterGemmArgs> kRouterGemmCpu;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCpu;
extern const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardCpu;
extern const Implementation<RoutingSumsArgs> kRoutingSumsCpu;
extern const Implementation<RouterLossesArgs> kRouterLossesCpu;
#ifdef SWITCHYARD_WITH_CUDA
extern const Implementation<RouteArgs> kRouteCudaGroups;
extern const Implementation<RouteArgs> kRouteCudaWarp;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCudaWarp;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCudaLosses;
extern const Implementation<RoutingSumsArgs> kRoutingSumsCuda;
extern const Implementation<RouterLossesArgs> kRouterLossesCuda;
extern const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardCuda;
extern const Implementation<RouterGemmArgs> kRouterGemmFew;
extern const Implementation<RouterGemmArgs> kRouterGemmSm90;
extern const Implementation<RouterGemmArgs> kRouterGemmCuda;

/// Bytes of Execution::workspace that router_gemm needs on the current device.
[[nodiscard]] std::int64_t router_gemm_workspace_bytes(std::int64_t max_tokens,
                                                       std::int64_t num_experts,
                                                       std::int64_t hidden);
#endif

/// That a selection bias is something to this router.
/// @throws Error{kInvalidArgument}.
void check_selection_bias(const RouterConfig& config);

/// Whether the choice compares logits instead of scores: it is the same wherever the score grows
/// with the logit and nothing is added to it, does not depend on rounding of exp, and does not tie
/// where float scores saturate.
[[nodiscard]] inline bool compares_logits(const RouteArgs& args) {
  const TopKRouter& router = args.config.as_top_k();
  return args.selection_bias.data == nullptr &&
         (router.groups == router.top_groups || router.group_score == GroupScore::kMax ||
          router.score == Score::kTopkSoftmax);
}

}  // namespace switchyard
