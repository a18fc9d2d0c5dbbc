#include "bench/cases/plain_files.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "core/cpu/memory.hpp"

namespace switchyard::bench {
namespace {

constexpr std::int64_t kChunk = 256 << 10;

}  // namespace

PlainFile::PlainFile(const std::filesystem::path& path)
    : name_(path.string()), fd_(open(name_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (fd_ < 0) fail_io("open");
  bytes_ = static_cast<std::int64_t>(std::filesystem::file_size(path));
}

PlainFile::~PlainFile() {
  if (fd_ >= 0) close(fd_);
}

PlainFile::PlainFile(PlainFile&& other) noexcept
    : name_(std::move(other.name_)), fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_) {}

void PlainFile::read(std::int64_t at, std::int64_t count, std::byte* out) const {
  while (count > 0) {
    const ssize_t got = pread(fd_, out, static_cast<std::size_t>(count), at);
    if (got <= 0) fail_io("read");
    at += got;
    out += got;
    count -= got;
  }
}

void PlainFile::drop() const {
  if (fdatasync(fd_) != 0 || posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED) != 0) fail_io("drop");
}

void PlainFile::fail_io(const char* what) const {
  fail(ErrorCode::kIo, "{}: {}: {}", name_, what, std::strerror(errno));
}

PlainFiles::PlainFiles(const std::filesystem::path& checkpoint) {
  if (std::filesystem::is_regular_file(checkpoint)) {
    files_.emplace_back(checkpoint);
  } else {
    for (const auto& entry : std::filesystem::directory_iterator(checkpoint)) {
      if (entry.path().extension() == ".safetensors") files_.emplace_back(entry.path());
    }
  }
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const std::int64_t bytes = files_[i].bytes();
    for (std::int64_t at = 0; at < bytes; at += kChunk) {
      chunks_.push_back({i, at, std::min(kChunk, bytes - at)});
    }
  }
}

double PlainFiles::bytes() const {
  double sum = 0;
  for (const PlainFile& file : files_) sum += static_cast<double>(file.bytes());
  return sum;
}

void PlainFiles::drop() const {
  for (const PlainFile& file : files_) file.drop();
}

void PlainFiles::read(ThreadPool& pool) const {
  const cpu::HugeBuffer memory(static_cast<std::size_t>(kChunk * pool.num_threads()));
  pool.parallel_for(std::ssize(chunks_), [&](std::int64_t i, int worker) {
    const Chunk& chunk = chunks_[static_cast<std::size_t>(i)];
    files_[chunk.file].read(chunk.at, chunk.bytes, memory.data() + worker * kChunk);
  });
}

}  // namespace switchyard::bench
