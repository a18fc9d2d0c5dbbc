// `switchyard report`: result lines as one HTML page that needs nothing else.
#include <fmt/core.h>

#include "core/atomic_file.hpp"
#include "core/printable.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/output_files.hpp"
#include "tool/report/lines.hpp"
#include "tool/report/page.hpp"
#include "tool/report/study_page.hpp"
#include "tool/report/suites.hpp"
#include "tool/study/study_files.hpp"

namespace switchyard::tool {

namespace {

/// The page of a study's directory.
int report_study(const Options& options) {
  const std::filesystem::path directory = options.positional.front();
  const NamedFile output{"--output", options.output};
  check_output_place(output);
  check_outputs_apart({output},
                      {{"FILE", directory / kStudyFile}, {"FILE", directory / kLinesFile}});
  const nlohmann::json document = read_study(directory);
  std::string page;
  try {
    page = study_page(document);
  } catch (const nlohmann::json::exception& error) {
    throw UsageError("FILE: {} is no study's: {}", (directory / kStudyFile).string(), error.what());
  }
  write_text(options.output, page);
  fmt::print("{}: {} arms\n", printable(options.output), document.at("arms").size());
  return kFine;
}

}  // namespace

int report_command(const Options& options) {
  std::error_code none;
  if (options.positional.size() == 1 &&
      std::filesystem::is_directory(options.positional.front(), none)) {
    return report_study(options);
  }
  const NamedFile output{"--output", options.output};
  std::vector<NamedFile> inputs;
  for (const std::string& path : options.positional) {
    if (std::filesystem::is_directory(path, none)) {
      throw UsageError("FILE: {} is a directory, want it alone (a study's), or files", path);
    }
    inputs.push_back({"FILE", path});
  }
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
