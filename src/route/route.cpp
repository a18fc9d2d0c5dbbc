// Contract checks of the router, and which implementation runs it.
#include "switchyard/route.hpp"

#include "core/shape_check.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

constexpr const Implementation<RouterGemmArgs>* kRouterGemms[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kRouterGemmFew, &kRouterGemmSm90, &kRouterGemmCuda,
#endif
    &kRouterGemmCpu};
constexpr const Implementation<RouteArgs>* kRoutes[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kRouteCudaGroups, &kRouteCudaWarp,
#endif
    &kRouteCpu};

std::string sizes_of(const RouterGemmArgs& args) {
  return fmt::format("{} tokens x {} {}, {} experts' gate {}", args.tokens.rows, args.tokens.cols,
                     to_string(args.tokens.dtype), args.gate.rows, to_string(args.gate.dtype));
}

std::string sizes_of(const RouteArgs& args) {
  const TopKRouter& router = args.config.as_top_k();
  return fmt::format("{} tokens, {} of {} experts, {} of {} groups", args.logits.shape[0],
                     router.top_k, args.config.num_experts, router.top_groups, router.groups);
}

}  // namespace

void router_gemm(const RouterGemmArgs& args) {
  const std::int64_t num_experts = args.gate.rows;
  require_float("tokens", args.tokens.dtype);
  require_float("gate", args.gate.dtype);
  require_shape("tokens", args.tokens, args.logits.shape[0], args.gate.cols);
  require_shape("gate", args.gate, num_experts, args.tokens.cols);
  require_shape("logits", args.logits, args.tokens.rows, num_experts);
  if (args.bias.data != nullptr) require_shape("bias", args.bias, num_experts);
  select<RouterGemmArgs>("router_gemm", kRouterGemms, args, sizes_of).run(args);
}

void route(const RouteArgs& args) {
  check(args.config);
  const std::int64_t num_tokens = args.logits.shape[0];
  require_shape("logits", args.logits, num_tokens, args.config.num_experts);
  require_shape("expert", args.routing.expert, num_tokens, args.config.top_k());
  require_shape("weight", args.routing.weight, num_tokens, args.config.top_k());
  if (args.request.top_score.data != nullptr) {
    require_shape("top_score", args.request.top_score, num_tokens);
  }
  require(args.request.record == nullptr, "a record is asked of route, which fills none");
  if (args.selection_bias.data != nullptr) {
    require_shape("selection_bias", args.selection_bias, args.config.num_experts);
    check_selection_bias(args.config);
  }
  select<RouteArgs>("route", kRoutes, args, sizes_of).run(args);
}

}  // namespace switchyard
