#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/files/directory_lock.hpp"

namespace switchyard::models {

/// "step-000100".
[[nodiscard]] std::string checkpoint_name(std::int64_t step);

/// Steps that a run's directory has checkpoints of, ascending; none where there is no directory.
/// @throws Error{kBadFile}: it cannot be read.
[[nodiscard]] std::vector<std::int64_t> checkpoint_steps(const std::filesystem::path& directory);

/// A run's directory, locked against other processes (where the file system has locks). Hidden
/// directories that a killed process has left are removed.
class RunDirectory {
 public:
  /// Makes it. @throws Error{kInvalidArgument}: it cannot be made or written to; {kIo}: another
  /// process trains there.
  explicit RunDirectory(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::filesystem::path checkpoint(std::int64_t step) const {
    return path_ / checkpoint_name(step);
  }
  /// A checkpoint that is there whole or not at all: `write` puts its files into a hidden
  /// directory, which then gets its name. Where it throws nothing is left.
  void save(std::int64_t step,
            const std::function<void(const std::filesystem::path&)>& write) const;
  /// Removes all but the newest `keep`; 0: none. Each is hidden before its files go.
  void prune(std::int64_t keep) const;

 private:
  std::filesystem::path path_;
  DirectoryLock lock_;
};

}  // namespace switchyard::models
