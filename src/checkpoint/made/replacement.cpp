#include "checkpoint/made/replacement.hpp"

#include <algorithm>

#include "checkpoint/file_names.hpp"
#include "checkpoint/files/directory.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

/// Whether a checkpoint has a file of that name.
bool is_checkpoint_file(const std::string& name) {
  if (name == kConfigFile || name == kSingleFile || name == kIndexFile) return true;
  const std::string form = shard_name(0, 0);
  return std::equal(name.begin(), name.end(), form.begin(), form.end(), [](char c, char wanted) {
    return wanted == '0' ? c >= '0' && c <= '9' : c == wanted;
  });
}

void remove_file(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::remove(path, error);
  if (error) fail(ErrorCode::kIo, "{}: remove: {}", path.string(), error.message());
}

}  // namespace

CheckpointReplacement::CheckpointReplacement(const std::filesystem::path& directory)
    : directory_(directory), lock_(directory, "is writing a checkpoint") {
  if (!lock_.is_held()) return;
  for (const std::string& name : names_in(directory)) {
    if (is_checkpoint_file(target_of_temporary(name))) remove_file(directory / name);
  }
}

AtomicFile& CheckpointReplacement::add(const std::string& name) {
  files_.push_back({name, std::make_unique<AtomicFile>(directory_ / name)});
  return *files_.back().file;
}

void CheckpointReplacement::add_text(const std::string& name, const std::string& text) {
  AtomicFile& file = add(name);
  file.write(text);
  file.finish();
}

bool CheckpointReplacement::is_new(const std::string& name) const {
  return std::any_of(files_.begin(), files_.end(),
                     [&](const File& file) { return file.name == name; });
}

void CheckpointReplacement::commit() {
  for (const File& file : files_) file.file->finish();
  remove_file(directory_ / kConfigFile);
  for (const std::string& name : names_in(directory_)) {
    if (is_checkpoint_file(name) && !is_new(name)) remove_file(directory_ / name);
  }
  std::stable_partition(files_.begin(), files_.end(),
                        [](const File& file) { return file.name != kConfigFile; });
  for (const File& file : files_) file.file->commit();
}

}  // namespace switchyard
