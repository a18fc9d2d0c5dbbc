#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>
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

/// What an error says behind the words of its code.
[[nodiscard]] inline std::string message_of(const Error& error) {
  return std::string(error.what()).substr(std::string_view(to_string(error.code())).size() + 2);
}

/// The same error with the place that it is of in front.
[[nodiscard]] inline Error at_place(const std::string& place, const Error& error) {
  return {error.code(), place + ": " + message_of(error)};
}

}  // namespace switchyard
