#include "tool/report_error.hpp"

#include <fmt/core.h>

#include <iostream>

#include "comm/ranks/launch.hpp"
#include "core/printable.hpp"
#include "core/say.hpp"
#include "tool/options/usage_error.hpp"

namespace switchyard::tool {

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnsupported:
    case ErrorCode::kBadFile: return kWrongUse;
    default: return kFailure;
  }
}

std::string rank_words() {
  try {
    const Launch launch = read_launch();
    return launch.world > 1 ? fmt::format(" (rank {})", launch.rank) : "";
  } catch (const Error&) {
    return "";  // then that error is being reported
  }
}

int report_error(std::string message, int exit_code) {
  for (char& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  std::cout.flush();
  say(fmt::format("switchyard{}: {}\n", rank_words(), printable(message, kPrintableLine)));
  return exit_code;
}

}  // namespace switchyard::tool
