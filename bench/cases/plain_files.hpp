#pragma once

// A checkpoint's files as bytes, past any mapping: what it costs to read them at all.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {

class PlainFile {
 public:
  /// @throws Error{kIo}, as all below.
  explicit PlainFile(const std::filesystem::path& path);
  ~PlainFile();
  PlainFile(PlainFile&& other) noexcept;
  PlainFile& operator=(PlainFile&&) = delete;

  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  void read(std::int64_t at, std::int64_t count, std::byte* out) const;
  /// Out of the page cache.
  void drop() const;

 private:
  [[noreturn]] void fail_io(const char* what) const;

  std::string name_;
  int fd_;
  std::int64_t bytes_ = 0;
};

/// The .safetensors files of a checkpoint.
class PlainFiles {
 public:
  explicit PlainFiles(const std::filesystem::path& checkpoint);

  [[nodiscard]] double bytes() const;
  void drop() const;
  /// All of them once, on all threads, into buffers that stay in the caches.
  void read(ThreadPool& pool) const;

 private:
  struct Chunk {
    std::size_t file;
    std::int64_t at, bytes;
  };
  std::vector<PlainFile> files_;
  std::vector<Chunk> chunks_;
};

}  // namespace switchyard::bench
