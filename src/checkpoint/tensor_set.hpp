#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/files/safetensors.hpp"

namespace switchyard {

/// The tensors of one model, from one file or from shards.
class TensorSet {
 public:
  /// @param directory  Has `model.safetensors.index.json` and its shards, or `model.safetensors`.
  static std::shared_ptr<const TensorSet> open(const std::filesystem::path& directory);
  /// One file of any name.
  static std::shared_ptr<const TensorSet> open_file(const std::filesystem::path& file);

  /// Where the tensors come from, for messages.
  [[nodiscard]] const std::string& name() const { return name_; }
  /// Every file that has been read, the index too.
  [[nodiscard]] const std::vector<std::filesystem::path>& paths() const { return paths_; }
  /// Null if there is none of that name.
  [[nodiscard]] const StoredTensor* find(std::string_view tensor) const;
  /// Names of all, sorted. They live as long as the set.
  [[nodiscard]] std::vector<std::string_view> names() const;
  /// The file that has a tensor of this set.
  [[nodiscard]] const MappedFile& file_of(const StoredTensor& tensor) const;
  /// @throws Error{kBadFile}: it is missing, or has another shape.
  [[nodiscard]] const StoredTensor& at(const std::string& tensor,
                                       const std::vector<std::int64_t>& shape) const;
  /// An F32, BF16 or F16 tensor as f32.
  /// @throws Error{kBadFile}: missing, of another shape or dtype.
  [[nodiscard]] std::vector<float> floats(const std::string& tensor,
                                          const std::vector<std::int64_t>& shape) const;

 private:
  const SafetensorsFile& add_file(const std::filesystem::path& file);
  void add_shards(const std::filesystem::path& index);

  std::string name_;
  std::vector<std::filesystem::path> paths_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unordered_map<std::string_view, const StoredTensor*> index_;
};

}  // namespace switchyard
