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
    &kRouteCudaReroute,
    &kRouteCudaGroups,
    &kRouteCudaWarp,
    &kRouteCudaTwoBest,
    &kRouteCudaVariableRules,
    &kRouteCudaTokenRules,
    &kRouteCudaExpertChoice,
    &kRouteCudaPlaced,
#endif
    &kRouteCpu,
    &kRouteCpuGShard,
    &kRouteCpuAdaMoe,
    &kRouteCpuTopP,
    &kRouteCpuRelu,
    &kRouteCpuExpertChoice,
    &kRouteCpuExpertThreshold,
    &kRouteCpuHash,
    &kRouteCpuForced};
constexpr const Implementation<NoiseArgs>* kNoises[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kNoiseCuda,
#endif
    &kNoiseCpu};

std::string sizes_of(const RouterGemmArgs& args) {
  return fmt::format("{} tokens x {} {}, {} experts' gate {}", args.tokens.rows, args.tokens.cols,
                     to_string(args.tokens.dtype), args.gate.rows, to_string(args.gate.dtype));
}

std::string sizes_of(const RouteArgs& args) {
  const std::int64_t num_tokens = args.routing.expert.shape[0];
  if (!args.config.is_top_k()) {
    return fmt::format("{} tokens, {} experts, router {}", num_tokens, args.config.num_experts,
                       rule_name(args.config.kind));
  }
  const TopKRouter& router = args.config.as_top_k();
  return fmt::format("{} tokens, {} of {} experts, {} of {} groups", num_tokens, router.top_k,
                     args.config.num_experts, router.top_groups, router.groups);
}

std::string sizes_of(const NoiseArgs& args) {
  const bool jitter = args.noise.kind == RouterNoise::Kind::kInputJitter;
  const auto [rows, cols] = jitter ? args.jittered.shape : args.logits.shape;
  return fmt::format("{} tokens x {} {}", rows, cols, jitter ? "numbers" : "experts");
}

/// What the rule needs of a call besides logits.
void check_request(const RouteArgs& args, std::int64_t num_tokens) {
  const bool hash = std::holds_alternative<HashRouter>(args.config.kind);
  require(!hash || args.request.token_ids.data != nullptr || num_tokens == 0,
          "the router hash goes by token ids, but token_ids is not given");
  if (args.request.token_ids.data != nullptr) {
    require_shape("token_ids", args.request.token_ids, num_tokens);
  }
  if (args.hash_table.data != nullptr) {
    const auto* router = std::get_if<HashRouter>(&args.config.kind);
    require(router != nullptr && router->table != nullptr,
            "hash_table is given to the router {}, which has no table",
            rule_name(args.config.kind));
    require_shape("hash_table", args.hash_table, std::ssize(*router->table) / router->top_k,
                  router->top_k);
  }
  if (const auto* router = std::get_if<ExpertChoiceRouter>(&args.config.kind)) {
    require(router->group == 0 || num_tokens % router->group == 0,
            "group={} of expert choice does not divide the {} tokens of the call", router->group,
            num_tokens);
  }
}

void check_room(const RouteArgs& args) {
  require(args.room >= 0, "room={} of an expert is negative", args.room);
  if (args.room == 0) return;
  check_reroutes(args.config);
}

}  // namespace

void check_reroutes(const RouterConfig& config) {
  require(config.is_top_k() && config.as_top_k().score != Score::kSparseMixer,
          "the drop policy reroute with {} {}: nothing says which expert is the next best but "
          "scores of top-k",
          config.is_top_k() ? "the score" : "the router",
          config.is_top_k() ? "sparse-mixer" : rule_name(config.kind));
}

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

void check_noise(const NoiseArgs& args) {
  const auto [num_tokens, cols] = args.jittered.shape;
  if (args.noise.kind == RouterNoise::Kind::kInputJitter && args.tokens.data != nullptr) {
    require_float("tokens", args.tokens.dtype);
    require_shape("tokens", args.tokens, num_tokens, cols);
  }
  if (args.noise.kind == RouterNoise::Kind::kLearned) {
    require_shape("noise_logits", args.noise_logits, args.logits.shape[0], args.logits.shape[1]);
  }
}

void add_noise(const NoiseArgs& args) {
  if (args.noise.kind == RouterNoise::Kind::kNone) return;
  check_noise(args);
  select<NoiseArgs>("noise", kNoises, args, sizes_of).run(args);
}

void check_route(const RouteArgs& args) {
  check(args.config);
  const std::int64_t num_tokens = args.routing.expert.shape[0];
  if (args.config.has_logits()) {
    require_shape("logits", args.logits, num_tokens, args.config.num_logits());
  } else {
    require(args.logits.data == nullptr, "logits are given to the router {}, which has none",
            rule_name(args.config.kind));
  }
  require_shape("expert", args.routing.expert, num_tokens, args.config.top_k());
  require_shape("weight", args.routing.weight, num_tokens, args.config.top_k());
  if (args.request.top_score.data != nullptr) {
    require(args.config.is_top_k(), "top_score is asked of the router {}: only top-k has it",
            rule_name(args.config.kind));
    require_shape("top_score", args.request.top_score, num_tokens);
  }
  require(args.request.record == nullptr, "a record is asked of route, which fills none");
  if (args.selection_bias.data != nullptr) {
    require_shape("selection_bias", args.selection_bias, args.config.num_experts);
    check_selection_bias(args.config);
  }
  check_request(args, num_tokens);
  check_room(args);
}

void route(const RouteArgs& args) {
  check_route(args);
  select<RouteArgs>("route", kRoutes, args, sizes_of).run(args);
}

}  // namespace switchyard
