// `switchyard report`: result lines as one HTML page that needs nothing else.
#include <fmt/core.h>

#include "core/atomic_file.hpp"
#include "core/printable.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/output_files.hpp"
#include "tool/report/lines.hpp"
#include "tool/report/page.hpp"
#include "tool/report/suites.hpp"

namespace switchyard::tool {

int report_command(const Options& options) {
  const NamedFile output{"--output", options.output};
  std::vector<NamedFile> inputs;
  for (const std::string& path : options.positional) inputs.push_back({"FILE", path});
  check_output_place(output);
  check_outputs_apart({output}, inputs);
  const Lines lines = read_lines(options.positional);
  write_text(options.output, page_of(lines));
  const std::size_t suites = suites_of(lines).size();
  fmt::print("{}: {} line{} in {} suite{}\n", printable(options.output), lines.lines.size(),
             lines.lines.size() == 1 ? "" : "s", suites, suites == 1 ? "" : "s");
  if (lines.read > lines.lines.size()) {
    fmt::print("older lines of what was measured again: {}\n", lines.read - lines.lines.size());
  }
  return kFine;
}

}  // namespace switchyard::tool
