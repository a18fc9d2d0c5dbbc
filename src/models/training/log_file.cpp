#include "models/training/log_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "checkpoint/files/mapped_file.hpp"
#include "core/check.hpp"

namespace switchyard::models {
namespace {

/// JSON has no infinity and no NaN.
nlohmann::ordered_json number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
}

nlohmann::ordered_json number(const std::optional<double>& value) {
  return value ? number(*value) : nlohmann::ordered_json();
}

std::string line_of(const StepRecord& record) {
  nlohmann::ordered_json line = {{"step", record.step},
                                 {"loss", number(record.loss)},
                                 {"norm", number(record.norm)},
                                 {"lr", record.learning_rate},
                                 {"tokens_per_s", number(record.tokens_per_s)},
                                 {"share", number(record.share)},
                                 {"load_cv", number(record.load_cv)},
                                 {"max_vio", number(record.max_vio)},
                                 {"picks", number(record.picks)},
                                 {"dropped", number(record.dropped)}};
  if (record.skipped) line["skipped"] = true;
  if (record.valid_loss) line["valid_loss"] = number(record.valid_loss);
  for (const auto& [name, value] : record.measured) line[name] = number(value);
  return line.dump() + "\n";
}

/// Bytes of the lines, from the beginning, that are whole and of steps up to `steps`.
std::size_t kept_bytes(std::string_view text, std::int64_t steps) {
  std::size_t kept = 0;
  for (;;) {
    const std::size_t end = text.find('\n', kept);
    if (end == std::string_view::npos) return kept;
    const auto line = nlohmann::json::parse(text.substr(kept, end - kept), nullptr, false);
    const bool is_step = line.is_object() && line.contains("step") &&
                         line["step"].is_number_integer() &&
                         line["step"].get<std::int64_t>() <= steps;
    if (!is_step) return kept;
    kept = end + 1;
  }
}

}  // namespace

LogFile::LogFile(const std::filesystem::path& path, std::int64_t steps) : path_(path) {
  std::size_t kept = 0;
  if (steps > 0 && kind_of(path) == FileKind::kFile) kept = kept_bytes(read_text(path), steps);
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(kept)) != 0) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    fail(ErrorCode::kIo, "{}: cannot be written: {}", path.string(), std::strerror(error));
  }
}

LogFile::~LogFile() { ::close(fd_); }

void LogFile::append(const StepRecord& record) {
  const std::string line = line_of(record);
  std::string_view left = line;
  const off_t before = ::lseek(fd_, 0, SEEK_END);
  while (!left.empty()) {
    const ssize_t written = ::write(fd_, left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      if (::ftruncate(fd_, before) != 0) errno = error;  // then resuming cuts it
      fail(ErrorCode::kIo, "{}: write: {}", path_.string(), std::strerror(error));
    }
    left.remove_prefix(static_cast<std::size_t>(written));
  }
}

void LogFile::sync() {
  if (::fsync(fd_) != 0 && errno != EINVAL) {
    fail(ErrorCode::kIo, "{}: fsync: {}", path_.string(), std::strerror(errno));
  }
}

}  // namespace switchyard::models
