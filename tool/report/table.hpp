#pragma once

#include <string>
#include <vector>

#include "tool/report/lines.hpp"

namespace switchyard::tool {

/// Lines of one section on one machine.
using LineList = std::vector<const Line*>;

/// The members that are about what was measured (those of the case first) and in which the lines
/// differ, in the order of their columns.
[[nodiscard]] std::vector<std::string> varying_members(const LineList& lines);

/// What a reader calls a member: "T", "median, µs".
[[nodiscard]] std::string title_of(const std::string& member);

/// What tells a line from its neighbours: "zipf:1.0, aligned:64". Members in `but` are left out.
[[nodiscard]] std::string words_of_line(const Line& line, const std::vector<std::string>& varying,
                                        const std::vector<std::string>& but);

/// Every line as a row: members in which they differ are columns, what they share is said once
/// below, and which members are left to the files. Longer ones are folded.
[[nodiscard]] std::string table_of(const LineList& lines);

/// A table of text. Rows may be as long as `head`; a cell that is a number is sorted as one.
[[nodiscard]] std::string plain_table(const std::vector<std::string>& head,
                                      const std::vector<std::vector<std::string>>& rows);

/// `table` behind a line that opens it.
[[nodiscard]] std::string folded(const std::string& summary, const std::string& table, bool open);

}  // namespace switchyard::tool
