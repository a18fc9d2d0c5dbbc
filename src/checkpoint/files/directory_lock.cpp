#include "checkpoint/files/directory_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/check.hpp"

namespace switchyard {

DirectoryLock::DirectoryLock(const std::filesystem::path& directory, std::string_view does) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  directory_ = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  require(directory_ >= 0, "cannot make the directory {}: {}", directory.string(),
          error ? error.message() : std::strerror(errno));
  is_held_ = ::flock(directory_, LOCK_EX | LOCK_NB) == 0;
  if (!is_held_ && errno == EWOULDBLOCK) {
    ::close(directory_);
    fail(ErrorCode::kIo, "{}: another process {} there", directory.string(), does);
  }
}

DirectoryLock::~DirectoryLock() { ::close(directory_); }

void DirectoryLock::sync() const { ::fsync(directory_); }

}  // namespace switchyard
