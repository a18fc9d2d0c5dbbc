#pragma once

// The parts of the page that are about all lines.

#include <string>
#include <vector>

#include "tool/report/suites.hpp"

namespace switchyard::tool {

/// What there is, and how close each stage came to the machine's limit.
[[nodiscard]] std::string overview_of(const Lines& lines, const std::vector<Suite>& suites);

/// Bars with pass and miss, each with the lines that answer it; "" where no line answers one.
[[nodiscard]] std::string bars_of(const Lines& lines);
/// How many answers of bars hold, and how many there are.
struct BarCount {
  std::size_t held = 0, all = 0;
};
[[nodiscard]] BarCount count_bars(const Lines& lines);

/// Machines: parts, measured roofs, versions, commits.
[[nodiscard]] std::string machines_of(const Lines& lines);

/// A roofline for each machine whose roofs are in its lines.
[[nodiscard]] std::string rooflines_of(const Lines& lines);

/// What is paid for what: load against time, tokens a second against the time of a layer, time
/// against drops, with the frontier.
[[nodiscard]] std::string trades_of(const Lines& lines);

/// Drop against capacity, measured and by the closed form.
[[nodiscard]] std::string capacity_of(const Lines& lines);

/// Loads of the experts as bars and heat maps.
[[nodiscard]] std::string routing_of(const Lines& lines);

}  // namespace switchyard::tool
