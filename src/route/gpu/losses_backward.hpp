#pragma once

#include <optional>
#include <string>

#include "switchyard/backward.hpp"

namespace switchyard::routing {

/// Why add_losses_on_gpu() cannot, or nothing.
[[nodiscard]] std::optional<std::string> reject_losses(const RouteBackwardArgs& args);

/// Adds the gradient of the call's losses to dlogits, whose rule has been gone back through: of
/// scores that are a softmax.
void add_losses_on_gpu(const RouteBackwardArgs& args);

}  // namespace switchyard::routing
