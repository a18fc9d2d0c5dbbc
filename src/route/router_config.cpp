// What a router's configuration must be.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <variant>

#include "core/check.hpp"
#include "route/implementations.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {
namespace {

constexpr std::int32_t kMostIterations = 1024;

void check_choices(std::int32_t top_k, std::int32_t num_experts) {
  require(top_k >= 1, "top_k={} is not positive", top_k);
  require(top_k <= num_experts, "top_k={} exceeds num_experts={}", top_k, num_experts);
}

void check(const TopKRouter& router, std::int32_t num_experts) {
  check_choices(router.top_k, num_experts);
  require(router.groups >= 1 && num_experts % router.groups == 0,
          "groups={} does not divide num_experts={}", router.groups, num_experts);
  require(router.top_groups >= 1 && router.top_groups <= router.groups,
          "top_groups={} is not in 1 to groups={}", router.top_groups, router.groups);
  const std::int32_t choice = router.top_groups * (num_experts / router.groups);
  require(router.top_k <= choice, "top_k={} exceeds the {} experts of top_groups={} groups",
          router.top_k, choice, router.top_groups);
  require(router.score != Score::kSparseMixer || router.groups == 1,
          "groups={}: the score sparse-mixer has none", router.groups);
  require(std::isfinite(router.scale), "scale={} is not finite", router.scale);
}

void check(const GShardRouter& router, std::int32_t num_experts) {
  require(num_experts >= 2, "the router gshard has two experts of num_experts={}", num_experts);
  require(router.threshold > 0 && router.threshold <= 1, "threshold={} is not in (0, 1]",
          router.threshold);
}

void check(const AdaMoeRouter& router, std::int32_t num_experts) {
  check_choices(router.top_k, num_experts);
  require(router.null_experts >= 1, "null_experts={} of adamoe is not positive",
          router.null_experts);
  require(router.null_experts <= std::numeric_limits<std::int32_t>::max() - num_experts,
          "null_experts={} are too many", router.null_experts);
}

void check(const TopPRouter& router, std::int32_t /*num_experts*/) {
  require(router.threshold > 0 && router.threshold <= 1, "threshold={} is not in (0, 1]",
          router.threshold);
}

void check(const ReluRouter& /*router*/, std::int32_t /*num_experts*/) {}

void check(const ExpertChoiceRouter& router, std::int32_t num_experts) {
  check_choices(router.top_k, num_experts);
  require(router.capacity_factor > 0 && std::isfinite(router.capacity_factor),
          "capacity_factor={} of expert choice is not positive", router.capacity_factor);
  require(router.group >= 0, "group={} is negative", router.group);
}

void check(const ExpertThresholdRouter& /*router*/, std::int32_t /*num_experts*/) {}

void check(const HashRouter& router, std::int32_t num_experts) {
  check_choices(router.top_k, num_experts);
  if (router.table == nullptr) return;
  const std::vector<std::int32_t>& table = *router.table;
  require(table.size() % static_cast<std::size_t>(router.top_k) == 0,
          "a table of {} experts is not one of top_k={} for each token id", table.size(),
          router.top_k);
  // Few are looked at in every call; who makes the table sees to all of them.
  require(table.empty() || (table.front() >= 0 && table.front() < num_experts),
          "the table's first expert is {}, want 0 to {}", table.empty() ? 0 : table.front(),
          num_experts - 1);
}

void check(const ForcedRouter& router, std::int32_t num_experts) {
  check_choices(router.top_k, num_experts);
  const bool hot = router.load == ForcedRouter::Load::kHot;
  require(std::isfinite(router.amount) && router.amount >= 0 && (!hot || router.amount <= 1),
          "amount={} of a forced load is not {}", router.amount,
          hot ? "in 0 to 1" : "a number from 0");
  require(router.load != ForcedRouter::Load::kDirichlet || router.amount > 0,
          "a concentration of {} is not positive", router.amount);
}

void check(const RouterNoise& noise, const RouterConfig& config) {
  if (noise.kind == RouterNoise::Kind::kNone) return;
  require(config.has_logits(), "noise with the router {}, which has no logits",
          rule_name(config.kind));
  const bool jitter = noise.kind == RouterNoise::Kind::kInputJitter;
  require(noise.size >= 0 && std::isfinite(noise.size) && (!jitter || noise.size < 1),
          "noise of size {} is not {}", noise.size, jitter ? "in 0 to 1" : "a number from 0");
}

void check(const ChainConfig& chain, const RouterConfig& config) {
  require(chain.iterations >= 0 && chain.iterations <= kMostIterations,
          "iterations={} of a chain is not in 1 to {}", chain.iterations, kMostIterations);
  if (!config.is_chain()) return;
  require(config.has_logits(), "a chain of iterations with the router {}, which has no logits",
          rule_name(config.kind));
  require(config.noise.kind != RouterNoise::Kind::kLearned,
          "a chain of iterations with learned noise, which has no gate for each of them");
}

void check(const RouterNetwork& network, const RouterConfig& config) {
  constexpr std::int32_t kMostWidth = 1 << 20;
  require(network.width >= 0 && network.width <= kMostWidth,
          "width={} of a network is not in 1 to {}", network.width, kMostWidth);
  if (network.is_linear()) {
    require(network.width == 0, "width={} with network=linear, which has none", network.width);
    return;
  }
  require(config.has_logits(), "network={} with the router {}, which has no logits",
          to_string(network.kind), rule_name(config.kind));
  require(!config.is_chain(), "network={} with a chain, which has a gate alone for each iteration",
          to_string(network.kind));
}

void check(const ZeroComputationExperts& free, const RouterConfig& config) {
  for (const auto& [name, count] :
       {std::pair{"constant", free.constant}, {"copy", free.copy}, {"zero", free.zero}}) {
    require(count >= 0 && count < config.num_experts,
            "{}={} zero-computation experts, want 0 to {} of num_experts={}", name, count,
            config.num_experts - 1, config.num_experts);
  }
  const std::int64_t all = std::int64_t{free.constant} + free.copy + free.zero;
  require(all < config.num_experts,
          "{} zero-computation experts of num_experts={}: none is left that computes", all,
          config.num_experts);
  require(free.tau >= 0 && free.tau <= 1, "tau={} of zero-computation experts is not in 0 to 1",
          free.tau);
  require(all > 0 || free.tau == 0, "tau={} without zero-computation experts", free.tau);
}

void check_gating_residual(const RouterConfig& config) {
  if (!config.gating_residual) return;
  const char* const name = config.is_chain() ? "chain" : rule_name(config.kind);
  require(config.has_logits() && !config.is_chain() && config.num_logits() == config.num_experts,
          "a gating residual with the router {}: want one that goes by the logits of its experts "
          "alone, once a layer",
          name);
}

}  // namespace

const char* to_string(RouterNetwork::Kind kind) noexcept {
  switch (kind) {
    case RouterNetwork::Kind::kLinear: return "linear";
    case RouterNetwork::Kind::kCosine: return "cosine";
    case RouterNetwork::Kind::kMlp: return "mlp";
    case RouterNetwork::Kind::kHadamard: return "hadamard";
  }
  return "?";
}

void check_selection_bias(const RouterConfig& config) {
  if (std::holds_alternative<ExpertThresholdRouter>(config.kind)) return;
  require(config.is_top_k(), "a selection bias: the router {} has none", rule_name(config.kind));
  require(config.as_top_k().score != Score::kSparseMixer,
          "a selection bias: the score sparse-mixer has none");
}

void check(const RouterConfig& config) {
  require(config.num_experts >= 1, "num_experts={} is not positive", config.num_experts);
  std::visit([&](const auto& router) { check(router, config.num_experts); }, config.kind);
  check(config.noise, config);
  check(config.chain, config);
  check(config.network, config);
  check(config.zero_computation, config);
  check_gating_residual(config);
}

RouterCapacity capacity_for(const RouterConfig& config, double factor, std::int64_t num_tokens) {
  const ZeroComputationExperts& free = config.zero_computation;
  if (free.total() == 0 || free.tau == 0) {
    return {.computing = capacity_of(factor, num_tokens, config.top_k(), config.num_experts)};
  }
  const double tau = free.tau;
  // What an expert's share is of that of one among num_experts that are alike.
  const double more = config.num_experts / (tau * config.num_computing() + free.total());
  const auto slots = [&](double share) {
    return capacity_of(factor * share, num_tokens, config.top_k(), config.num_experts);
  };
  return {.computing = slots(tau * more), .zero_computation = slots(more)};
}

const char* rule_name(const Router& kind) {
  struct Name {
    const char* operator()(const TopKRouter& /*router*/) const { return "top-k"; }
    const char* operator()(const GShardRouter& /*router*/) const { return "gshard"; }
    const char* operator()(const AdaMoeRouter& /*router*/) const { return "adamoe"; }
    const char* operator()(const TopPRouter& /*router*/) const { return "top-p"; }
    const char* operator()(const ReluRouter& /*router*/) const { return "relu"; }
    const char* operator()(const ExpertChoiceRouter& /*router*/) const { return "expert-choice"; }
    const char* operator()(const ExpertThresholdRouter& /*router*/) const {
      return "expert-threshold";
    }
    const char* operator()(const HashRouter& /*router*/) const { return "hash"; }
    const char* operator()(const ForcedRouter& router) const {
      constexpr const char* kLoads[] = {"uniform", "round-robin", "zipf", "hot", "dirichlet"};
      return kLoads[static_cast<std::size_t>(router.load)];
    }
  };
  return std::visit(Name{}, kind);
}

std::int64_t tokens_of_expert(const ExpertChoiceRouter& router, std::int64_t group,
                              std::int32_t num_experts) {
  const double share = router.capacity_factor * static_cast<double>(group) * router.top_k /
                       static_cast<double>(num_experts);
  // What is whole but for rounding is whole.
  const auto tokens = static_cast<std::int64_t>(std::min(share, 1e18) + 1e-9);
  return std::clamp<std::int64_t>(tokens, std::min<std::int64_t>(1, group), group);
}

}  // namespace switchyard
