#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tool/report/table.hpp"

namespace switchyard::tool {

/// A suite on a machine.
struct Suite {
  std::string name{}, machine{};
  LineList lines{};
};

/// In the order in which files have them; machines of one suite stand together.
[[nodiscard]] std::vector<Suite> suites_of(const Lines& lines);

/// Lines of each machine, in the order in which files have them.
[[nodiscard]] std::vector<std::pair<std::string, LineList>> by_machine(const Lines& lines);

/// Stages that others are parts of, as "layer".
[[nodiscard]] bool is_whole_stage(const std::string& stage);

/// A section: its cases in one plot (one for each kind of sweep), the time of their stages, and
/// every line in a table. `id` is its place in the page.
[[nodiscard]] std::string section_of(const Suite& suite, const std::string& id);

}  // namespace switchyard::tool
