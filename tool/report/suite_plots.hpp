#pragma once

#include <string>

#include "tool/report/suites.hpp"

namespace switchyard::tool {

/// Plots of the medians of a suite's cases: over the member that it varies (tokens, if they are),
/// the other members that vary told by lines. Cases of one point are left to the table.
[[nodiscard]] std::string time_plots(const Suite& suite);

/// Bars of the stages of each case; "" where no case has two.
[[nodiscard]] std::string stage_bars(const Suite& suite);

}  // namespace switchyard::tool
