#pragma once

// Result lines of files, checked, each with its place on the page.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

/// A result line, whole, and where it is shown.
struct Line {
  nlohmann::json json{};
  std::string section{};  ///< The suite, or else the program, the bar or the case.
  std::string machine{};  ///< "NVIDIA H200", "2 x NVIDIA H200", "AMD EPYC, avx2".
};

/// What files hold: of what was measured again the newest line only, files are appended to.
struct Lines {
  std::vector<Line> lines{};
  std::size_t read = 0;  ///< With those that newer ones replaced.
};

/// Lines as `bench --results` and tools/add_results.py append them, whole or under a header; or the
/// document of `run --json`.
/// @throws UsageError that names the file and the line: no JSON object, a line of bench without one
///         of its members, a line of more than a megabyte; or that no file has a line.
[[nodiscard]] Lines read_lines(const std::vector<std::string>& files);

}  // namespace switchyard::tool
