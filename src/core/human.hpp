#pragma once

#include <string>
#include <string_view>

namespace switchyard {

/// "1.25 ms", "3.1 GB/s", "42 kB": three digits and a unit.
[[nodiscard]] std::string human_time(double microseconds);
[[nodiscard]] std::string human_count(double value, std::string_view unit);

}  // namespace switchyard
