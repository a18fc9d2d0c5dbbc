#pragma once

// Files that a target's input becomes, for what opens files by itself.

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace switchyard::fuzz {

/// A folder of this process, in memory where there is such a place; gone when the process ends.
inline const std::filesystem::path& scratch_folder() {
  static const struct Folder {
    Folder() {
      const bool has_memory = ::access("/dev/shm", W_OK) == 0;
      path = (has_memory ? std::filesystem::path("/dev/shm")
                         : std::filesystem::temp_directory_path()) /
             ("switchyard-fuzz-" + std::to_string(::getpid()));
      std::filesystem::create_directories(path);
    }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
    std::filesystem::path path;
  } folder;
  return folder.path;
}

/// @returns the path of the file.
inline std::string write_scratch(const char* name, const std::uint8_t* data, std::size_t size) {
  const std::string path = scratch_folder() / name;
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr || std::fwrite(data, 1, size, file) != size || std::fclose(file) != 0) {
    std::abort();
  }
  return path;
}

}  // namespace switchyard::fuzz
