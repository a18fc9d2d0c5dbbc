#pragma once

// What the tests of files share: a directory that goes away, and files in it.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/files/directory.hpp"
#include "testkit/expect_error.hpp"

namespace switchyard::test {

class TempDir {
 public:
  TempDir() {
    static std::atomic<int> counter{0};
    // In memory where there is such a place: our writers sync every file, which takes a disk longer
    // than all the rest of a test.
    const std::filesystem::path memory = "/dev/shm";
    const bool has_memory = ::access(memory.c_str(), W_OK) == 0;
    path_ = (has_memory ? memory : std::filesystem::temp_directory_path()) /
            ("switchyard-test-" + std::to_string(::getpid()) + "-" + std::to_string(counter++));
    std::filesystem::create_directories(path_);
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::filesystem::path operator/(const char* name) const { return path_ / name; }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const {
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

/// Names of what lies in a folder, in order.
inline std::vector<std::string> sorted_names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names = names_in(folder);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace switchyard::test
