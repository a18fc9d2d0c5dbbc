#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace switchyard {

/// A file that appears whole or not at all: bytes go to a hidden temporary file in the same
/// directory, commit() syncs it and renames it into place. Without commit() the temporary file is
/// removed.
class AtomicFile {
 public:
  /// @throws Error{kInvalidArgument}: the directory does not exist or may not be written, or the
  ///         path names something that is not a regular file; {kIo}: the system refused otherwise.
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// @throws Error{kIo} (disk full).
  void write(std::span<const std::byte> bytes);
  void write(const std::string& text) { write(std::as_bytes(std::span(text))); }
  /// All bytes are on the disk; nothing more can be written, and commit() only renames.
  /// @throws Error{kIo}.
  void finish();
  /// @throws Error{kIo}; the old file, if any, is then still there.
  void commit();

 private:
  [[noreturn]] void fail_io(const char* what, int error) const;

  std::filesystem::path path_;
  std::string temporary_;
  int fd_ = -1;
  struct Slot;  ///< Of the list of unfinished files.
  Slot* slot_ = nullptr;
  friend void remove_unfinished_files() noexcept;
};

/// Replace a text file whole.
void write_text(const std::filesystem::path& path, const std::string& text);

/// The name of the file that a hidden one was to become, as a killed process leaves it behind;
/// empty: it is not one of ours.
[[nodiscard]] std::string target_of_temporary(const std::string& name);

/// Unlink every temporary file that is being written. Safe to call in a signal handler that ends
/// the process afterwards.
void remove_unfinished_files() noexcept;

}  // namespace switchyard
