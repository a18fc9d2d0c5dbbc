#pragma once

#include <string>

#include "tool/report/lines.hpp"

namespace switchyard::tool {

/// One page that needs nothing else: its style, its script and what draws its plots are inside.
[[nodiscard]] std::string page_of(const Lines& lines);

/// A page with what all have: style, script, what draws plots, head and links.
/// @param title, what  Text. @param links, main  HTML.
[[nodiscard]] std::string page_around(const std::string& title, const std::string& what,
                                      const std::string& links, const std::string& main);

}  // namespace switchyard::tool
