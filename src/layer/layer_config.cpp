// What a layer's configuration must be.
#include <fmt/core.h>

#include <bit>

#include "core/check.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

void check(const LayerConfig& config) {
  check(config.router);
  check(config.experts);
  const std::int32_t others = config.router.zero_computation.total();
  require(config.router.num_computing() == config.experts.num_experts,
          "the router has {} experts, the layer {}{}", config.router.num_experts,
          config.experts.num_experts,
          others == 0 ? "" : fmt::format(" and {} zero-computation experts", others));
  require(
      !config.weight_on_input || config.router.top_k() == 1,
      "weight_on_input with top_k={}: a token has one input, so it goes with one expert a token",
      config.router.top_k());
  if (config.shared.num_experts > 0) {
    check(config.shared);
    require(config.shared.num_experts == 1 && config.shared.hidden == config.experts.hidden,
            "shared experts are given as {} experts of hidden size {}, want 1 of {}",
            config.shared.num_experts, config.shared.hidden, config.experts.hidden);
  }
  require(config.reduction_groups >= 1 &&
              std::has_single_bit(static_cast<std::uint32_t>(config.reduction_groups)),
          "reduction_groups={} is not a power of two", config.reduction_groups);
}

}  // namespace switchyard
