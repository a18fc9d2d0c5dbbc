#include "checkpoint/files/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

/// Closes on every way out.
struct Descriptor {
  int fd = -1;
  explicit Descriptor(int descriptor) : fd(descriptor) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

/// Whole pages around the bytes. A neighbour that still uses one of them only maps it again.
void advise(std::span<const std::byte> bytes, int advice) {
  if (bytes.empty()) return;
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(bytes.data() + bytes.size());
  // Refused advice changes nothing but speed and memory.
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, advice);  // NOLINT
}

}  // namespace

void read_ahead(std::span<const std::byte> bytes) { advise(bytes, MADV_WILLNEED); }
void give_back(std::span<const std::byte> bytes) { advise(bytes, MADV_DONTNEED); }

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const std::string name = path.string();
  // Non-blocking: a FIFO given by mistake is refused below instead of being waited for.
  Descriptor file(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd < 0) bad_file(name, "cannot be read: {}", std::strerror(errno));
  struct stat status = {};
  if (::fstat(file.fd, &status) != 0) {
    fail(ErrorCode::kIo, "{}: fstat: {}", name, std::strerror(errno));
  }
  require_file(S_ISREG(status.st_mode), name, "is not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return std::shared_ptr<const MappedFile>(new MappedFile({}, name, -1));
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) fail(ErrorCode::kIo, "{}: mmap: {}", name, std::strerror(errno));
  return std::shared_ptr<const MappedFile>(new MappedFile(
      {static_cast<const std::byte*>(data), size}, name, std::exchange(file.fd, -1)));
}

MappedFile::MappedFile(std::span<const std::byte> bytes, std::string name, int fd)
    : bytes_(bytes), name_(std::move(name)), fd_(fd) {}

void MappedFile::copy(std::span<const std::byte> part, void* out) const {
  auto* to = static_cast<std::byte*>(out);
  while (!part.empty()) {
    const ssize_t got = ::pread(fd_, to, part.size(), part.data() - bytes_.data());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(ErrorCode::kIo, "{}: read: {}", name_, std::strerror(errno));
    if (got == 0) fail(ErrorCode::kIo, "{}: has been shortened while it was read", name_);
    to += got;
    part = part.subspan(static_cast<std::size_t>(got));
  }
}

MappedFile::~MappedFile() {
  // munmap does not write, whatever the signature says.
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  if (fd_ >= 0) ::close(fd_);
}

FileKind kind_of(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) return FileKind::kNothing;
  require_file(!error, path.string(), "cannot be read: {}", error.message());
  return std::filesystem::is_directory(status) ? FileKind::kDirectory : FileKind::kFile;
}

std::string read_text(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  return {reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size()};
}

}  // namespace switchyard
