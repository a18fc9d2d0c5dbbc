// What a router's configuration must be.
#include <cmath>
#include <variant>

#include "core/check.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

void check(const TopKRouter& router, std::int32_t num_experts) {
  require(router.top_k >= 1, "top_k={} is not positive", router.top_k);
  require(router.top_k <= num_experts, "top_k={} exceeds num_experts={}", router.top_k,
          num_experts);
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

}  // namespace

void check_selection_bias(const RouterConfig& config) {
  require(config.as_top_k().score != Score::kSparseMixer,
          "a selection bias: the score sparse-mixer has none");
}

void check(const RouterConfig& config) {
  require(config.num_experts >= 1, "num_experts={} is not positive", config.num_experts);
  std::visit([&](const auto& router) { check(router, config.num_experts); }, config.kind);
}

}  // namespace switchyard
