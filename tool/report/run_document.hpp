#pragma once

#include <nlohmann/json.hpp>
#include <vector>

namespace switchyard::tool {

/// The document of `switchyard run --json` as lines, one a stage; its routing goes with the last.
/// Nothing: it is another document.
[[nodiscard]] std::vector<nlohmann::json> lines_of_run(const nlohmann::json& document);

}  // namespace switchyard::tool
