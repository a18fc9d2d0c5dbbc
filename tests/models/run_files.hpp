#pragma once

// What a run has left, to be compared.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace switchyard::models {

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// {path: bytes} of all files below a folder, hidden ones too.
inline std::map<std::string, std::string> files_below(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) {
      files[std::filesystem::relative(entry.path(), folder).string()] = content_of(entry.path());
    }
  }
  return files;
}

/// The log without times.
inline std::vector<nlohmann::json> log_of(const std::filesystem::path& directory) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(directory / "log.jsonl");
  for (std::string line; std::getline(file, line);) {
    lines.push_back(nlohmann::json::parse(line));
    lines.back().erase("tokens_per_s");
    lines.back().erase("share");
  }
  return lines;
}

}  // namespace switchyard::models
