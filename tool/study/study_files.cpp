#include "tool/study/study_files.hpp"

#include <algorithm>

#include "checkpoint/files/json.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/atomic_file.hpp"
#include "tool/options/usage_error.hpp"

namespace switchyard::tool {

using nlohmann::json;

void write_study(const std::filesystem::path& directory, const json& document,
                 const RunResults& results) {
  std::string lines;
  for (const auto& [name, result] : results) lines += result.dump() + "\n";
  std::filesystem::create_directories(directory);
  write_text(directory / kLinesFile, lines);
  write_text(directory / kStudyFile, document.dump(1) + "\n");
}

json read_study(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kStudyFile;
  if (kind_of(file) != FileKind::kFile) {
    throw UsageError("FILE: {} has no {}, as switchyard study leaves it", directory.string(),
                     kStudyFile);
  }
  json document = parse_json(read_text(file), file.string());
  const bool is_ours = document.is_object() && document.contains("study") &&
                       document.contains("arms") && document["arms"].is_array() &&
                       document.contains("sentences") && document.contains("reference");
  if (!is_ours) throw UsageError("FILE: {} is no study's", file.string());
  return document;
}

std::vector<double> counted_floors(const std::filesystem::path& directory, const json& text,
                                   const json& valid) {
  if (kind_of(directory / kStudyFile) != FileKind::kFile) return {};
  const json document = read_study(directory);
  if (document.value("text", json()) != text || document.value("valid", json()) != valid) return {};
  const json floors = document.value("floors", json());
  const bool are_numbers =
      floors.is_array() && std::all_of(floors.begin(), floors.end(),
                                       [](const json& floor) { return floor.is_number(); });
  return are_numbers ? floors.get<std::vector<double>>() : std::vector<double>{};
}

}  // namespace switchyard::tool
