#pragma once

// Members of result lines by their path, and how a page shows them. Lines come from files: a member
// may be missing or of any kind.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace switchyard::tool {

/// The member at a path as "case.T"; nullptr: there is none.
[[nodiscard]] const nlohmann::json* member_of(const nlohmann::json& line, std::string_view path);

/// A finite number at a path; nothing where there is none.
[[nodiscard]] std::optional<double> number_of(const nlohmann::json& line, std::string_view path);

/// Text at a path; "" where there is none.
[[nodiscard]] std::string text_of(const nlohmann::json& line, std::string_view path);

/// True where a path holds `true`.
[[nodiscard]] bool flag_of(const nlohmann::json& line, std::string_view path);

/// A value as a table shows it: numbers with four digits, never in powers of ten where a reader
/// would rather see the number.
[[nodiscard]] std::string shown(const nlohmann::json& value);
[[nodiscard]] std::string shown(double value);

/// All text, numbers and truth values with their paths, in the order of their names; short lists of
/// them as one text.
using Leaves = std::vector<std::pair<std::string, nlohmann::json>>;
[[nodiscard]] Leaves leaves_of(const nlohmann::json& line);

/// Text inside HTML.
[[nodiscard]] std::string escape_html(std::string_view text);

/// Text as the content of a <script>, which no text of it can end.
[[nodiscard]] std::string script_text(const nlohmann::json& value);

}  // namespace switchyard::tool
