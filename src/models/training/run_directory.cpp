#include "models/training/run_directory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>

#include "checkpoint/files/directory.hpp"
#include "checkpoint/files/file_error.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"

namespace switchyard::models {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";

/// Of a name as checkpoint_name() makes them.
std::optional<std::int64_t> step_of(const std::string& name) {
  std::int64_t step = 0;
  const char* end = name.data() + name.size();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  const bool whole = error == std::errc() && stop == end && step >= 0;
  return whole && checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

/// A name as AtomicFile has them, so that one function knows what a killed process has left.
std::string hidden_name(std::int64_t step) {
  static int counter = 0;
  return fmt::format(".{}.{}-{}.tmp", checkpoint_name(step), ::getpid(), counter++);
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail(ErrorCode::kIo, "{}: remove: {}", path.string(), error.message());
}

void rename_directory(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(ErrorCode::kIo, "{}: rename: {}", to.string(), std::strerror(errno));
  }
}

/// Gone with its files unless it was renamed.
struct HiddenDirectory {
  fs::path path;
  explicit HiddenDirectory(const fs::path& hidden) : path(hidden) {
    std::error_code error;
    fs::create_directory(path, error);
    if (error) fail(ErrorCode::kIo, "{}: {}", path.string(), error.message());
  }
  ~HiddenDirectory() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  HiddenDirectory(const HiddenDirectory&) = delete;
  HiddenDirectory& operator=(const HiddenDirectory&) = delete;
};

}  // namespace

std::string checkpoint_name(std::int64_t step) { return fmt::format("{}{:06}", kPrefix, step); }

std::vector<std::int64_t> checkpoint_steps(const fs::path& directory) {
  std::vector<std::int64_t> steps;
  std::error_code ignored;
  if (!fs::exists(directory, ignored)) return steps;
  for (const std::string& name : names_in(directory)) {
    if (const auto step = step_of(name)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

RunDirectory::RunDirectory(const fs::path& path) : path_(path), lock_(path, "trains") {
  if (!lock_.is_held()) return;
  for (const std::string& name : names_in(path)) {
    if (step_of(target_of_temporary(name))) remove_tree(path / name);
  }
}

void RunDirectory::save(std::int64_t step,
                        const std::function<void(const fs::path&)>& write) const {
  const HiddenDirectory hidden(path_ / hidden_name(step));
  write(hidden.path);
  rename_directory(hidden.path, checkpoint(step));
  lock_.sync();
}

void RunDirectory::prune(std::int64_t keep) const {
  if (keep == 0) return;
  std::vector<std::int64_t> steps = checkpoint_steps(path_);
  for (; std::ssize(steps) > keep; steps.erase(steps.begin())) {
    const fs::path hidden = path_ / hidden_name(steps.front());
    rename_directory(checkpoint(steps.front()), hidden);
    remove_tree(hidden);
  }
}

}  // namespace switchyard::models
