#pragma once

#include "switchyard/backward.hpp"

namespace switchyard::routing {

/// The way back of rules whose weights are softmax probabilities over all experts as they are:
/// dlogits_e = p_e (g_e - sum_k g_k p_k), g_e = 0 where e is not chosen.
void all_probabilities_backward(const RouteBackwardArgs& args);

/// Of such rules and the others without sigmoids: adds the gradient of the call's losses, if it has
/// any, to dlogits.
void add_losses(const RouteBackwardArgs& args);

}  // namespace switchyard::routing
