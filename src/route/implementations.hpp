#pragma once

#include "core/select.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/losses.hpp"

namespace switchyard {

extern const Implementation<RouteArgs> kRouteCpu;
extern const Implementation<RouteArgs> kRouteCpuGShard;
extern const Implementation<RouteArgs> kRouteCpuAdaMoe;
extern const Implementation<RouteArgs> kRouteCpuTopP;
extern const Implementation<RouteArgs> kRouteCpuRelu;
extern const Implementation<RouteArgs> kRouteCpuExpertChoice;
extern const Implementation<RouteArgs> kRouteCpuExpertThreshold;
extern const Implementation<RouteArgs> kRouteCpuHash;
extern const Implementation<RouteArgs> kRouteCpuForced;
extern const Implementation<NoiseArgs> kNoiseCpu;
extern const Implementation<NoiseBackwardArgs> kNoiseBackwardCpu;
extern const Implementation<RouterGemmArgs> kRouterGemmCpu;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCpu;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCpuGShard;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCpuAdaMoe;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCpuTopP;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCpuRelu;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCpuExpertChoice;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCpuExpertThreshold;
extern const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardCpu;
extern const Implementation<RoutingSumsArgs> kRoutingSumsCpu;
extern const Implementation<RouterLossesArgs> kRouterLossesCpu;
#ifdef SWITCHYARD_WITH_CUDA
extern const Implementation<RouteArgs> kRouteCudaGroups;
extern const Implementation<RouteArgs> kRouteCudaReroute;
extern const Implementation<RouteArgs> kRouteCudaWarp;
extern const Implementation<RouteArgs> kRouteCudaTwoBest;
extern const Implementation<RouteArgs> kRouteCudaVariableRules;
extern const Implementation<RouteArgs> kRouteCudaTokenRules;
extern const Implementation<RouteArgs> kRouteCudaExpertChoice;
extern const Implementation<RouteArgs> kRouteCudaPlaced;
extern const Implementation<NoiseArgs> kNoiseCuda;
extern const Implementation<NoiseBackwardArgs> kNoiseBackwardCuda;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCudaWarp;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCudaLosses;
extern const Implementation<RouteBackwardArgs> kRouteBackwardCudaRules;
extern const Implementation<RoutingSumsArgs> kRoutingSumsCuda;
extern const Implementation<RouteAtOnceArgs> kRouteAtOnceCuda;
extern const Implementation<RouterLossesArgs> kRouterLossesCuda;
extern const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardSm90;
extern const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardCuda;
extern const Implementation<RouterGemmArgs> kRouterGemmFew;
extern const Implementation<RouterGemmArgs> kRouterGemmSm90;
extern const Implementation<RouterGemmArgs> kRouterGemmCuda;

/// Bytes of Execution::workspace that router_gemm needs on the current device.
[[nodiscard]] std::int64_t router_gemm_workspace_bytes(std::int64_t max_tokens,
                                                       std::int64_t num_experts,
                                                       std::int64_t hidden);
#endif

/// "top-k", "gshard", "top-p", ...: the rule's name.
[[nodiscard]] const char* rule_name(const Router& kind);

/// Of an implementation of one kind for the CPU: why not.
template <typename Kind, typename Args>
std::optional<std::string> reject_but(const Args& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  if (std::holds_alternative<Kind>(args.config.kind)) return std::nullopt;
  return fmt::format("is for the router {}", rule_name(Kind{}));
}

/// Of a kernel for TopKRouter alone: why not another.
[[nodiscard]] inline std::optional<std::string> reject_other_than_top_k(
    const RouterConfig& config) {
  if (config.is_top_k()) return std::nullopt;
  return fmt::format("does not know the router {}", rule_name(config.kind));
}

/// AdaMoE's choice among all logits, as if every one were an expert's.
[[nodiscard]] inline RouterConfig among_all_logits(const RouterConfig& config) {
  return {.num_experts = config.num_logits(),
          .kind = TopKRouter{.top_k = config.top_k(), .score = Score::kTopkSoftmax}};
}

/// What route() asks of its arguments. @throws Error{kInvalidArgument}, {kUnsupported}.
void check_route(const RouteArgs& args);

/// Of a kernel that knows no room: why not a call with some.
[[nodiscard]] inline std::optional<std::string> reject_room(const RouteArgs& args) {
  if (args.room == 0) return std::nullopt;
  return "takes tokens all at once, and experts have room for so many";
}

/// That sums have the shapes of so many tokens' ones. @throws Error{kInvalidArgument}.
void check_sums(const RoutingSums& sums, std::int64_t num_tokens);

/// What add_noise() asks of its arguments. @throws Error{kInvalidArgument}.
void check_noise(const NoiseArgs& args);

/// C of expert choice: the tokens of a group that each expert takes.
[[nodiscard]] std::int64_t tokens_of_expert(const ExpertChoiceRouter& router, std::int64_t group,
                                            std::int32_t num_experts);

/// That a selection bias is something to this router.
/// @throws Error{kInvalidArgument}.
void check_selection_bias(const RouterConfig& config);

/// That DropPolicy::kReroute is something to this router.
/// @throws Error{kInvalidArgument}.
void check_reroutes(const RouterConfig& config);

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
