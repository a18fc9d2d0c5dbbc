#include "tool/sweep/duration.hpp"

#include <fmt/core.h>

namespace switchyard::tool {

std::string human_duration(double seconds) {
  if (seconds < 120) return fmt::format("{:.3g} s", seconds);
  if (seconds < 7200) return fmt::format("{:.3g} minutes", seconds / 60);
  return fmt::format("{:.3g} hours", seconds / 3600);
}

double text_seconds(double samples, double prompt, double generate, double tokens_per_second) {
  return samples * (prompt + generate) / tokens_per_second;
}

}  // namespace switchyard::tool
