#pragma once

// What lies in a directory.

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "checkpoint/files/file_error.hpp"

namespace switchyard {

/// The names in a directory, in no order. @throws Error{kBadFile}: it cannot be read.
[[nodiscard]] inline std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(directory, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  require_file(!error, directory.string(), "cannot be read: {}", error.message());
  return names;
}

}  // namespace switchyard
