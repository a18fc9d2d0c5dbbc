// What the experts' configuration must be.
#include <cmath>

#include "core/check.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

void check(const ExpertConfig& config) {
  require(config.num_experts >= 1, "num_experts={}, want at least 1", config.num_experts);
  require(config.hidden >= 1, "hidden={}, want at least 1", config.hidden);
  require(config.inner >= 1, "inner={}, want at least 1", config.inner);
  require(config.activation != Activation::kClampedSwiglu || config.gated,
          "activation clamped_swiglu needs gated experts");
  require(std::isfinite(config.alpha), "alpha={}, want a finite number", config.alpha);
  require(config.limit > 0, "limit={}, want a positive number", config.limit);
}

}  // namespace switchyard
