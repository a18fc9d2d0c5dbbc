#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

/// Whether a result line is a point of a fixed-size sweep.
[[nodiscard]] bool is_sweep_line(const nlohmann::json& line);

/// A section of the page per sweep, ranks and machine: a plot of the times and a table with M and
/// the padding. Of lines for the same point the last one counts.
/// @param sections  How many were made is added to it.
[[nodiscard]] std::string sweep_sections(const std::vector<nlohmann::json>& lines,
                                         std::size_t& sections);

}  // namespace switchyard::tool
