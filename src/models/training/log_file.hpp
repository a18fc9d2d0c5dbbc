#pragma once

#include <cstdint>
#include <filesystem>

#include "switchyard/models/trainer.hpp"

namespace switchyard::models {

/// log.jsonl of a run: a line a step, each written at once.
class LogFile {
 public:
  /// Keeps the lines of the first `steps` steps, and nothing of what a killed process has begun.
  /// @throws Error{kIo}; {kInvalidArgument}: it is not a regular file.
  LogFile(const std::filesystem::path& path, std::int64_t steps);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  /// @throws Error{kIo} (disk full); the file then ends with the line before.
  void append(const StepRecord& record);
  /// All lines are on the disk. @throws Error{kIo}.
  void sync();

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace switchyard::models
