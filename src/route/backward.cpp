// Contract checks of the router's way back, and which implementation runs it.
#include "core/id_check.hpp"
#include "core/shape_check.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

constexpr const Implementation<RouterGemmBackwardArgs>* kRouterGemms[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kRouterGemmBackwardSm90, &kRouterGemmBackwardCuda,
#endif
    &kRouterGemmBackwardCpu};
constexpr const Implementation<RouteBackwardArgs>* kRoutes[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kRouteBackwardCudaWarp,
    &kRouteBackwardCudaLosses,
    &kRouteBackwardCudaRules,
#endif
    &kRouteBackwardCpu,
    &kRouteBackwardCpuGShard,
    &kRouteBackwardCpuAdaMoe,
    &kRouteBackwardCpuTopP,
    &kRouteBackwardCpuRelu,
    &kRouteBackwardCpuExpertChoice,
    &kRouteBackwardCpuExpertThreshold};

constexpr const Implementation<NoiseBackwardArgs>* kNoises[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kNoiseBackwardCuda,
#endif
    &kNoiseBackwardCpu};

std::string sizes_of(const RouterGemmBackwardArgs& args) {
  return fmt::format("{} tokens x {} {}, {} experts' gate {}", args.tokens.rows, args.tokens.cols,
                     to_string(args.tokens.dtype), args.gate.rows, to_string(args.gate.dtype));
}

std::string sizes_of(const RouteBackwardArgs& args) {
  return fmt::format("{} tokens, {} of {} experts", args.logits.shape[0], args.expert.shape[1],
                     args.config.num_experts);
}

std::string sizes_of(const NoiseBackwardArgs& args) {
  return fmt::format("{} tokens x {} experts", args.dlogits.shape[0], args.dlogits.shape[1]);
}

}  // namespace

void noise_backward(const NoiseBackwardArgs& args) {
  const auto [num_tokens, cols] = args.dlogits.shape;
  require(args.noise.kind == RouterNoise::Kind::kLearned,
          "noise_backward of noise that is not learned");
  if (args.request.training) require_shape("noise_logits", args.noise_logits, num_tokens, cols);
  require_shape("dnoise_logits", args.dnoise_logits, num_tokens, cols);
  select<NoiseBackwardArgs>("noise_backward", kNoises, args, sizes_of).run(args);
}

void router_gemm_backward(const RouterGemmBackwardArgs& args) {
  const std::int64_t num_tokens = args.tokens.rows;
  const std::int64_t num_experts = args.gate.rows;
  require_float("tokens", args.tokens.dtype);
  require_float("gate", args.gate.dtype);
  require_shape("tokens", args.tokens, num_tokens, args.gate.cols);
  require_shape("gate", args.gate, num_experts, args.tokens.cols);
  require_shape("dlogits", args.dlogits, num_tokens, num_experts);
  if (args.dtokens.data != nullptr) {
    require_shape("dtokens", args.dtokens, num_tokens, args.tokens.cols);
  }
  if (args.dgate.data != nullptr) {
    require_shape("dgate", args.dgate, num_experts, args.tokens.cols);
    require_float("dgate", args.dgate.dtype);
  }
  if (args.dbias.data != nullptr) require_shape("dbias", args.dbias, num_experts);
  select<RouterGemmBackwardArgs>("router_gemm_backward", kRouterGemms, args, sizes_of).run(args);
}

void route_backward(const RouteBackwardArgs& args) {
  check(args.config);
  require(args.config.has_logits(), "the router {} has no logits, and so no way back",
          rule_name(args.config.kind));
  const std::int64_t num_tokens = args.logits.shape[0];
  require_shape("logits", args.logits, num_tokens, args.config.num_logits());
  require_shape("expert", args.expert, num_tokens, args.config.top_k());
  require_shape("dweight", args.dweight, num_tokens, args.config.top_k());
  require_shape("dlogits", args.dlogits, num_tokens, args.config.num_logits());
  if (args.losses.score.data != nullptr) {
    const std::int64_t groups = args.losses.score.shape[0];
    require_shape("prices of losses", args.losses.score, groups, args.config.num_logits());
    require(groups >= 1 && num_tokens % groups == 0,
            "prices of losses are of {} groups, which do not divide {} tokens", groups, num_tokens);
  }
  if (args.execution.backend == Backend::kCpu) {
    require_ids("expert", args.expert, args.config.num_experts);
  }
  select<RouteBackwardArgs>("route_backward", kRoutes, args, sizes_of).run(args);
}

}  // namespace switchyard
