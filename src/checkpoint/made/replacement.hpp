#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/files/directory_lock.hpp"
#include "core/atomic_file.hpp"

namespace switchyard {

/// A directory while the checkpoint in it is replaced. New files are written beside the older ones
/// under hidden names; commit() takes away what an older checkpoint left and renames the new ones,
/// config.json last. So whoever ends this process where leaves
/// - before commit(): the older checkpoint as it was, and at worst hidden files, which the next
///   replacement removes (after an interrupt there are none);
/// - within commit(), which renames and writes nothing: a directory without config.json, which no
///   reader takes for a checkpoint;
/// - never files of two checkpoints that are read as one.
/// The directory is locked: of two at once the second is refused (where the file system has locks).
/// Files of other names stay.
class CheckpointReplacement {
 public:
  /// Makes the directory.
  /// @throws Error{kInvalidArgument}: it cannot be made or written to; {kIo}: another process
  ///         writes a checkpoint there.
  explicit CheckpointReplacement(const std::filesystem::path& directory);

  /// A file of the new checkpoint, by its last name; to be finished when it is written.
  [[nodiscard]] AtomicFile& add(const std::string& name);
  void add_text(const std::string& name, const std::string& text);
  /// @throws Error{kIo}.
  void commit();

 private:
  struct File {
    std::string name;
    std::unique_ptr<AtomicFile> file;
  };

  [[nodiscard]] bool is_new(const std::string& name) const;

  std::filesystem::path directory_;
  DirectoryLock lock_;
  std::vector<File> files_;
};

}  // namespace switchyard
