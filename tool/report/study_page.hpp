#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace switchyard::tool {

/// The findings of a study (tool/study/study_files.hpp) as one page that needs nothing else: what
/// may be said, tables at equal tokens and equal time, losses over steps, operations and seconds
/// with their bands, loads over steps, learning rates, leaks and floors.
[[nodiscard]] std::string study_page(const nlohmann::json& document);

}  // namespace switchyard::tool
