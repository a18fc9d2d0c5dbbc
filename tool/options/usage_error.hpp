#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "core/printable.hpp"

namespace switchyard::tool {

/// Wrong use or bad input: one line that names the option or file, the value, and what would be
/// right. The tool prints it and exits with 2.
class UsageError : public std::runtime_error {
 public:
  template <typename... Args>
  explicit UsageError(fmt::format_string<Args...> format, Args&&... args)
      : std::runtime_error(printable_message(format, args...)) {}
};

/// Exit codes, a contract.
enum ExitCode : int {
  kFine = 0,
  kCheckFailed = 1,
  kWrongUse = 2,
  kFailure = 3,
  kInterrupted = 130,
};

}  // namespace switchyard::tool
