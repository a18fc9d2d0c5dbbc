#pragma once

#include <string_view>

namespace switchyard {

/// Text to stderr, at once. Where nobody listens, since it is closed or its disk is full, nothing
/// is said: that is no error of the work.
void say(std::string_view text) noexcept;

}  // namespace switchyard
