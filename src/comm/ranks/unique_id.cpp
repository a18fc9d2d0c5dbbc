// Names of meetings, and how a file tells one to all ranks.
#include "comm/ranks/unique_id.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <random>
#include <sstream>
#include <thread>

#include "core/atomic_file.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

struct Written {
  std::string id{};
  int process = 0;
};

/// The file's first bytes, more than an id and a process take; nothing if it cannot be read.
/// @throws Error{kInvalidArgument}: the path is a pipe, a device or a folder.
std::string read_start(const std::string& path) {
  // Non-blocking: a FIFO is refused below instead of being waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return {};
  std::array<char, 64> start{};
  struct stat status = {};
  const bool known = ::fstat(fd, &status) == 0;
  const bool regular = known && S_ISREG(status.st_mode);
  const ssize_t got = regular ? ::pread(fd, start.data(), start.size(), 0) : 0;
  ::close(fd);
  require(regular || !known, "{} is not a regular file", path);
  return {start.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0))};
}

/// What is in the file, if it is an id of a process that runs; else nothing.
Written read_file(const std::string& path) {
  Written written;
  std::istringstream file(read_start(path));
  const bool whole = static_cast<bool>(file >> written.id >> written.process);
  const bool runs = whole && std::filesystem::exists(fmt::format("/proc/{}", written.process));
  return runs && is_unique_id(written.id) ? written : Written{};
}

}  // namespace

std::string make_unique_id() {
  std::random_device random;
  std::string digits;
  while (digits.size() < kUniqueIdDigits) digits += fmt::format("{:08x}", random());
  return digits;
}

bool is_unique_id(const std::string& text) {
  return text.size() == kUniqueIdDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::string unique_id_by_file(const std::string& path, int rank, Deadline deadline) {
  require(rank >= 0, "rank {} is below 0", rank);
  if (rank == 0) {
    const Written other = read_file(path);
    require(other.id.empty(), "{} names the ranks of process {}, which still runs: want another",
            path, other.process);
    std::string id = make_unique_id();
    write_text(path, fmt::format("{} {}\n", id, getpid()));
    return id;
  }
  for (;;) {
    const Written written = read_file(path);
    if (!written.id.empty()) return written.id;
    if (std::chrono::steady_clock::now() >= deadline) {
      fail(ErrorCode::kTimeout, "unique id: waiting for rank 0, expected its file {}", path);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace switchyard
