#include "tool/output_files.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tool/options/usage_error.hpp"

namespace switchyard::tool {
namespace {

namespace fs = std::filesystem;

bool same_file(const fs::path& a, const fs::path& b) {
  struct stat of_a {};
  struct stat of_b {};
  if (stat(a.c_str(), &of_a) == 0 && stat(b.c_str(), &of_b) == 0) {
    return of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
  }
  std::error_code error;  // one of them is not there yet
  const fs::path place = fs::weakly_canonical(a, error);
  return !error && place == fs::weakly_canonical(b, error) && !error;
}

}  // namespace

void check_output_place(const NamedFile& output, Writing writing) {
  if (output.path.empty()) return;
  const std::string path = output.path.string();
  struct stat status {};
  if (stat(path.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) {
      throw UsageError("{}: {} is a directory, want a file", output.option, path);
    }
    const bool device = writing == Writing::kAppend && S_ISCHR(status.st_mode);
    if (!S_ISREG(status.st_mode) && !device) {
      throw UsageError("{}: {} is not a regular file", output.option, path);
    }
    if (device) return;
  } else if (errno != ENOENT && errno != ENOTDIR) {
    throw UsageError("{}: {} cannot be written: {}", output.option, path, std::strerror(errno));
  }
  const fs::path parent = output.path.parent_path();
  const std::string directory = parent.empty() ? "." : parent.string();
  std::error_code ignored;
  if (!fs::is_directory(directory, ignored)) {
    throw UsageError("{}: {}: there is no directory {}", output.option, path, directory);
  }
  if (access(directory.c_str(), W_OK) != 0) {
    throw UsageError("{}: {}: the directory {} cannot be written to", output.option, path,
                     directory);
  }
}

void check_outputs_apart(const std::vector<NamedFile>& outputs,
                         const std::vector<NamedFile>& inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [option, path] = outputs[i];
    if (path.empty()) continue;
    for (const NamedFile& input : inputs) {
      if (!input.path.empty() && same_file(path, input.path)) {
        throw UsageError("{}: {} is a file that {} reads ({}), want another", option, path.string(),
                         input.option, input.path.string());
      }
    }
    for (std::size_t before = 0; before < i; ++before) {
      if (!outputs[before].path.empty() && same_file(path, outputs[before].path)) {
        throw UsageError("{}: {} is the file of {} too, want two files", option, path.string(),
                         outputs[before].option);
      }
    }
  }
}

}  // namespace switchyard::tool
