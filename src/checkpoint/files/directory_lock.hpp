#pragma once

#include <filesystem>
#include <string_view>

namespace switchyard {

/// A directory that no other process may write to, where the file system has locks; until it is
/// destroyed, or the process ends.
class DirectoryLock {
 public:
  /// Makes the directory.
  /// @param does  What another one does there: "trains".
  /// @throws Error{kInvalidArgument}: it cannot be made or written to; {kIo}: another process does.
  DirectoryLock(const std::filesystem::path& directory, std::string_view does);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

  /// Whether there is a lock: else whose hidden files lie there cannot be known.
  [[nodiscard]] bool is_held() const { return is_held_; }
  /// New names in the directory outlast a power cut; not every file system can.
  void sync() const;

 private:
  int directory_ = -1;
  bool is_held_ = false;
};

}  // namespace switchyard
