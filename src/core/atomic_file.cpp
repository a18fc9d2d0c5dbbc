#include "core/atomic_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>

#include "core/check.hpp"

namespace switchyard {
namespace {

// A signal handler may not allocate or lock, so the names lie in fixed memory. A file that finds no
// free slot is written all the same; only an interrupt would leave its temporary file behind.
constexpr int kSlots = 16;
enum SlotState : int { kFree, kFilling, kUsed };
struct Slot {
  std::atomic<int> state{kFree};
  std::array<char, PATH_MAX> name{};
};
std::array<Slot, kSlots> unfinished;  // NOLINT: read by a signal handler

int remember(const std::string& name) {
  if (name.size() >= PATH_MAX) return -1;
  for (int i = 0; i < kSlots; ++i) {
    Slot& slot = unfinished[static_cast<std::size_t>(i)];
    int expected = kFree;
    if (!slot.state.compare_exchange_strong(expected, kFilling)) continue;
    std::memcpy(slot.name.data(), name.c_str(), name.size() + 1);
    slot.state = kUsed;
    return i;
  }
  return -1;
}

void forget(int slot) {
  if (slot >= 0) unfinished[static_cast<std::size_t>(slot)].state = kFree;
}

std::string temporary_name(const std::filesystem::path& path) {
  static std::atomic<unsigned> counter{0};
  const std::string name =
      fmt::format(".{}.{}-{}.tmp", path.filename().string(), ::getpid(), counter++);
  return (path.parent_path() / name).string();
}

/// Errors that say the caller asked for the wrong place, not that the system failed.
bool is_wrong_place(int error) {
  return error == ENOENT || error == ENOTDIR || error == EACCES || error == EPERM ||
         error == EROFS || error == ENAMETOOLONG || error == EISDIR;
}

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path) {
  std::error_code ignored;
  if (std::filesystem::is_symlink(path_, ignored)) {  // replace what it points to, not the link
    path_ = std::filesystem::weakly_canonical(path_, ignored);
  }
  const auto status = std::filesystem::status(path_, ignored);
  require(!path_.filename().empty() &&
              (!std::filesystem::exists(status) || std::filesystem::is_regular_file(status)),
          "cannot write {}: it is not a regular file", path.string());
  temporary_ = temporary_name(path_);
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    fail(is_wrong_place(errno) ? ErrorCode::kInvalidArgument : ErrorCode::kIo,
         "cannot write {}: {}", path.string(), std::strerror(errno));
  }
  slot_ = remember(temporary_);
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  forget(slot_);
}

void AtomicFile::fail_io(const char* what, int error) const {
  fail(ErrorCode::kIo, "{}: {}: {}", path_.string(), what, std::strerror(error));
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_io("write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail_io("fsync", errno);
  const int closed = ::close(fd_);
  fd_ = -1;
  if (closed != 0) fail_io("close", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_io("rename", errno);
  temporary_.clear();
  // Without this the new name may be lost in a power cut. Not every file system can: no error.
  const std::string parent = path_.parent_path().empty() ? "." : path_.parent_path().string();
  const int directory = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

void remove_unfinished_files() noexcept {
  for (Slot& slot : unfinished) {
    if (slot.state == kUsed) ::unlink(slot.name.data());
  }
}

}  // namespace switchyard
