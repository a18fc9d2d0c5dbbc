#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace switchyard {

/// A file's bytes, mapped read only and shared; pages are read when they are touched. Whoever holds
/// the pointer keeps the mapping. The file must not be shortened meanwhile (the system then ends
/// the process); files replaced by rename, as ours are, stay whole.
class MappedFile {
 public:
  /// @throws Error{kBadFile}: there is no such regular file, or it may not be read; {kIo}.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }
  /// A part of bytes() into memory of one's own, past the mapping, whose pages need not be found
  /// one by one then: for what is read once.
  /// @throws Error{kIo}: the device failed, or the file has been shortened.
  void copy(std::span<const std::byte> part, void* out) const;
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  MappedFile(std::span<const std::byte> bytes, std::string name, int fd);

  std::span<const std::byte> bytes_;
  std::string name_;
  int fd_;
};

/// Advice on bytes of a mapping: read them from the file ahead, without waiting; or leave them to
/// the page cache alone, so that they do not count as this process' memory until the next access.
void read_ahead(std::span<const std::byte> bytes);
void give_back(std::span<const std::byte> bytes);

enum class FileKind : std::uint8_t { kNothing, kDirectory, kFile };
/// What is there, links followed; every other kind of file counts as one.
/// @throws Error{kBadFile}: the system does not say (no permission, a loop of links).
[[nodiscard]] FileKind kind_of(const std::filesystem::path& path);

/// A small text file, whole.
/// @throws As MappedFile::open().
[[nodiscard]] std::string read_text(const std::filesystem::path& path);

}  // namespace switchyard
