#pragma once

#include "switchyard/backward.hpp"

namespace switchyard {

/// All that a backward reads and writes lies on the device; kernels move 16 bytes at a time.
/// @param has_tokens  Else only gradients of parameters count.
/// @throws Error{kInvalidArgument} that names the array.
void require_on_device(const BackwardArgs& args, bool has_tokens);

}  // namespace switchyard
