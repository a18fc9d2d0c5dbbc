#include "checkpoint/tensor_set.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <map>

#include "checkpoint/file_names.hpp"
#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/json.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"

namespace switchyard {

std::shared_ptr<const TensorSet> TensorSet::open(const std::filesystem::path& directory) {
  const auto index = directory / kIndexFile;
  if (kind_of(index) == FileKind::kNothing) return open_file(directory / kSingleFile);
  auto set = std::make_shared<TensorSet>();
  set->name_ = directory.string();
  set->paths_.push_back(index);
  set->add_shards(index);
  return set;
}

std::shared_ptr<const TensorSet> TensorSet::open_file(const std::filesystem::path& file) {
  auto set = std::make_shared<TensorSet>();
  set->name_ = file.string();
  set->add_file(file);
  for (const StoredTensor& tensor : set->files_.back()->tensors()) {
    set->index_[tensor.spec.name] = &tensor;
  }
  return set;
}

const SafetensorsFile& TensorSet::add_file(const std::filesystem::path& file) {
  files_.push_back(std::make_unique<SafetensorsFile>(file));
  paths_.push_back(file);
  return *files_.back();
}

void TensorSet::add_shards(const std::filesystem::path& index) {
  const std::string name = index.string();
  const Json json = parse_json(read_text(index), name);
  require_file(json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(),
               name, "has no object 'weight_map'");
  std::map<std::string, const SafetensorsFile*> shards;
  for (const auto& [tensor, shard] : json["weight_map"].items()) {
    require_file(shard.is_string(), name, "weight_map '{}' is not a file name", tensor);
    const auto& file = shard.get_ref<const std::string&>();
    // A shard lies beside its index: a path would let a checkpoint read any file.
    require_file(
        !file.empty() && file.find('/') == std::string::npos && file != "." && file != "..", name,
        "weight_map '{}': '{}' is not a plain file name", tensor, file);
    const SafetensorsFile*& opened = shards[file];
    if (opened == nullptr) {
      opened = &add_file(index.parent_path() / file);
    }
    const StoredTensor* found = opened->find(tensor);
    require_file(found != nullptr, opened->name(), "has no tensor '{}', which {} says it has",
                 tensor, name);
    index_[found->spec.name] = found;
  }
}

const StoredTensor* TensorSet::find(std::string_view tensor) const {
  const auto found = index_.find(tensor);
  return found == index_.end() ? nullptr : found->second;
}

std::vector<std::string_view> TensorSet::names() const {
  std::vector<std::string_view> names;
  for (const auto& entry : index_) names.push_back(entry.first);
  std::sort(names.begin(), names.end());
  return names;
}

const MappedFile& TensorSet::file_of(const StoredTensor& tensor) const {
  const std::less_equal<> in_order;
  for (const auto& file : files_) {
    const auto bytes = file->mapping()->bytes();
    if (in_order(bytes.data(), tensor.bytes.data()) &&
        in_order(tensor.bytes.data() + tensor.bytes.size(), bytes.data() + bytes.size())) {
      return *file->mapping();
    }
  }
  fail(ErrorCode::kInvalidArgument, "{}: tensor '{}' is not one of these", name_, tensor.spec.name);
}

const StoredTensor& TensorSet::at(const std::string& tensor,
                                  const std::vector<std::int64_t>& shape) const {
  const StoredTensor* found = find(tensor);
  require_file(found != nullptr, name_, "has no tensor '{}'", tensor);
  require_file(found->spec.shape == shape, name_, "tensor '{}' has shape {}, expected {}", tensor,
               shape_text(found->spec.shape), shape_text(shape));
  return *found;
}

std::vector<float> TensorSet::floats(const std::string& tensor,
                                     const std::vector<std::int64_t>& shape) const {
  const StoredTensor& found = at(tensor, shape);
  require_file(is_float(found.spec.type), name_, "tensor '{}' is {}, expected F32, BF16 or F16",
               tensor, to_string(found.spec.type));
  const std::int64_t count = *num_elements(shape);
  std::vector<float> values(static_cast<std::size_t>(count));
  row_ops::widen(*dtype_of(found.spec.type), found.bytes.data(), values.data(), count);
  return values;
}

}  // namespace switchyard
