// Names of meetings, and how a file tells one to all ranks.
#include "comm/ranks/unique_id.hpp"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "core/atomic_file.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

struct Written {
  std::string id{};
  int process = 0;
};

/// What is in the file, if it is an id of a process that runs; else nothing.
Written read_file(const std::string& path) {
  Written written;
  std::ifstream file(path);
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
