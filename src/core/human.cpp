#include "core/human.hpp"

#include <fmt/core.h>

#include <iterator>

namespace switchyard {

std::string human_time(double microseconds) {
  if (microseconds > 0 && microseconds < 0.1) return fmt::format("{:.3g} ns", microseconds * 1e3);
  if (microseconds < 1e3) return fmt::format("{:.3g} us", microseconds);
  if (microseconds < 1e6) return fmt::format("{:.3g} ms", microseconds * 1e-3);
  return fmt::format("{:.3g} s", microseconds * 1e-6);
}

std::string human_count(double value, std::string_view unit) {
  constexpr std::string_view kPrefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  std::size_t step = 0;
  while (value >= 999.5 && step + 1 < std::size(kPrefixes)) {
    value *= 1e-3;
    ++step;
  }
  return fmt::format("{:.3g} {}{}", value, kPrefixes[step], unit);
}

}  // namespace switchyard
