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

std::string temporary_name(const std::filesystem::path& path) {
  static std::atomic<unsigned> counter{0};
  const std::string name =
      fmt::format(".{}.{}-{}.tmp", path.filename().string(), ::getpid(), counter++);
  return (path.parent_path() / name).string();
}

/// Errors that say the caller asked for the wrong place, not that the system failed.
bool is_wrong_place(int error) {
  return error == ENOENT || error == ENOTDIR || error == EACCES || error == EPERM ||
         error == EROFS || error == ELOOP || error == ENAMETOOLONG || error == EISDIR;
}

}  // namespace

// A signal handler may neither allocate nor lock: it walks a list to which slots are only added,
// and whose names lie in the slots. As many are made as files were ever unfinished at a time.
struct AtomicFile::Slot {
  enum State : int { kFree, kFilling, kUsed };
  std::atomic<int> state{kFilling};
  std::array<char, PATH_MAX> name{};
  Slot* next = nullptr;

  static std::atomic<Slot*> first;

  static Slot* take(const std::string& name);
};

std::atomic<AtomicFile::Slot*> AtomicFile::Slot::first{nullptr};

/// Null: the name is too long for the system too.
AtomicFile::Slot* AtomicFile::Slot::take(const std::string& name) {
  if (name.size() >= PATH_MAX) return nullptr;
  Slot* slot = first;
  for (; slot != nullptr; slot = slot->next) {
    int expected = kFree;
    if (slot->state.compare_exchange_strong(expected, kFilling)) break;
  }
  if (slot == nullptr) {
    slot = new Slot;  // NOLINT(cppcoreguidelines-owning-memory): stays for the handler
    slot->next = first;
    while (!first.compare_exchange_weak(slot->next, slot)) {
    }
  }
  std::memcpy(slot->name.data(), name.c_str(), name.size() + 1);
  slot->state = kUsed;
  return slot;
}

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
  slot_ = Slot::take(temporary_);  // before it is there, so that no interrupt finds it unknown
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    if (slot_ != nullptr) slot_->state = Slot::kFree;
    fail(is_wrong_place(errno) ? ErrorCode::kInvalidArgument : ErrorCode::kIo,
         "cannot write {}: {}", path.string(), std::strerror(errno));
  }
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  if (slot_ != nullptr) slot_->state = Slot::kFree;
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

void AtomicFile::finish() {
  if (fd_ < 0) return;
  if (::fsync(fd_) != 0) fail_io("fsync", errno);
  const int closed = ::close(fd_);
  fd_ = -1;
  if (closed != 0) fail_io("close", errno);
}

void AtomicFile::commit() {
  finish();
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

std::string target_of_temporary(const std::string& name) {
  constexpr std::string_view kEnd = ".tmp";
  constexpr std::string_view kNumber = "0123456789";
  if (!name.starts_with('.') || !name.ends_with(kEnd)) return {};
  const std::string_view inner = std::string_view(name).substr(1, name.size() - 1 - kEnd.size());
  const std::size_t dot = inner.rfind('.');
  const std::size_t dash = inner.rfind('-');
  if (dot == std::string_view::npos || dash == std::string_view::npos || dash < dot) return {};
  const auto is_number = [&](std::string_view text) {
    return !text.empty() && text.find_first_not_of(kNumber) == std::string_view::npos;
  };
  const bool is_ours =
      is_number(inner.substr(dot + 1, dash - dot - 1)) && is_number(inner.substr(dash + 1));
  return is_ours ? std::string(inner.substr(0, dot)) : "";
}

void remove_unfinished_files() noexcept {
  for (const AtomicFile::Slot* slot = AtomicFile::Slot::first; slot != nullptr; slot = slot->next) {
    if (slot->state == AtomicFile::Slot::kUsed) ::unlink(slot->name.data());
  }
}

}  // namespace switchyard
