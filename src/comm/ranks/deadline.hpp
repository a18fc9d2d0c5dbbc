#pragma once

#include <chrono>

namespace switchyard {

using Deadline = std::chrono::steady_clock::time_point;

/// `limit` from now; a limit too long to add is a year.
[[nodiscard]] inline Deadline deadline_after(std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kYear = std::chrono::hours(24 * 365);
  return std::chrono::steady_clock::now() + (limit < kYear ? limit : kYear);
}

}  // namespace switchyard
