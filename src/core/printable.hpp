#pragma once

// The one home of how text from outside (names in files, words of a command line, messages of other
// libraries) gets into a message.

#include <fmt/core.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>

namespace switchyard {

/// As much of a text as a message carries: longer than any list that is made to be read ...
inline constexpr std::size_t kPrintableBytes = 800;
/// ... and as much of the message.
inline constexpr std::size_t kPrintableLine = 3000;

/// The same text, fit for a terminal and for one line: control characters, those that turn the
/// direction of writing and bytes that are not UTF-8 become "\x1b", and of more than `most` bytes
/// the middle is left out.
[[nodiscard]] std::string printable(std::string_view text, std::size_t most = kPrintableBytes);

/// A {fmt} message whose texts among the arguments are made printable.
template <typename... Args>
[[nodiscard]] std::string printable_message(fmt::string_view format, const Args&... args) {
  [[maybe_unused]] const auto fit = []<typename T>(const T& value) -> decltype(auto) {
    if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      return printable(value);
    } else {
      return (value);
    }
  };
  return fmt::format(fmt::runtime(format), fit(args)...);
}

}  // namespace switchyard
