#pragma once

#include <string>

#include "tool/report/lines.hpp"

namespace switchyard::tool {

/// One page that needs nothing else: its style, its script and what draws its plots are inside.
[[nodiscard]] std::string page_of(const Lines& lines);

}  // namespace switchyard::tool
