#pragma once

#include <string>

#include "switchyard/layer.hpp"

namespace switchyard::tool {

/// --check: a layer whose weights are all finite numbers, as nothing can be said of the output of
/// others. `where` opens the message.
/// @throws Error{kBadFile}: the first weight or bias that is not, its expert, part and position.
/// Cost: reads every weight of the layer once.
void check_weights(const LayerModel& model, const std::string& where);

}  // namespace switchyard::tool
