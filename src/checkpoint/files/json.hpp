#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>

namespace switchyard {

using Json = nlohmann::json;

/// Parse untrusted JSON. On top of the grammar: no key twice in an object (two readers could then
/// see two different files), and no nesting deeper than 64.
/// @param file  Opens the message of an error.
/// @throws Error{kBadFile}.
[[nodiscard]] Json parse_json(std::string_view text, const std::string& file);

}  // namespace switchyard
