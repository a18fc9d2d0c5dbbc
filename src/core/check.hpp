#pragma once

#include <fmt/core.h>

#include <utility>

#include "switchyard/error.hpp"

namespace switchyard {

/// Throws Error{code} with a {fmt} message.
template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

/// Contract check at an API boundary: the message says what must hold and the values that broke it,
/// in the words of the caller ("top_k=3 exceeds num_experts=2"), not in C++.
template <typename... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) fail(ErrorCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

}  // namespace switchyard
