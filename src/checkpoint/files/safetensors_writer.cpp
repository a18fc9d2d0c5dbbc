#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/files/json.hpp"
#include "checkpoint/files/safetensors.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

std::vector<TensorSpec> in_file_order(std::vector<TensorSpec> tensors) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return size_of(a.type) > size_of(b.type);
  });
  return tensors;
}

/// Length and JSON, padded with spaces to a multiple of 8 bytes: the data starts aligned.
std::string header_text(const std::vector<TensorSpec>& tensors) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  std::int64_t offset = 0;
  for (const TensorSpec& tensor : tensors) {
    require(!json.contains(tensor.name), "two tensors are named '{}'", tensor.name);
    const std::int64_t end = offset + tensor.num_bytes();
    json[tensor.name] = {{"dtype", to_string(tensor.type)},
                         {"shape", tensor.shape},
                         {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) {
    length[i] = static_cast<char>(text.size() >> (8 * i) & 0xffU);
  }
  return length + text;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::vector<TensorSpec> tensors)
    : tensors_(in_file_order(std::move(tensors))), file_(path) {
  file_.write(header_text(tensors_));
  for (const TensorSpec& tensor : tensors_) missing_ += tensor.num_bytes();
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  missing_ -= static_cast<std::int64_t>(bytes.size());
  require(missing_ >= 0, "{} bytes more than the tensors have", -missing_);
  file_.write(bytes);
}

void SafetensorsWriter::finish() {
  require(missing_ == 0, "{} bytes of the tensors are missing", missing_);
  file_.commit();
}

void write_safetensors(const std::filesystem::path& path, std::span<const StoredTensor> tensors) {
  std::vector<TensorSpec> specs;
  for (const StoredTensor& tensor : tensors) specs.push_back(tensor.spec);
  SafetensorsWriter writer(path, std::move(specs));
  for (const TensorSpec& spec : writer.tensors()) {
    const auto tensor = std::find_if(tensors.begin(), tensors.end(),
                                     [&](const auto& t) { return t.spec.name == spec.name; });
    require(static_cast<std::int64_t>(tensor->bytes.size()) == spec.num_bytes(),
            "tensor '{}' has {} bytes, its shape needs {}", spec.name, tensor->bytes.size(),
            spec.num_bytes());
    writer.append(tensor->bytes);
  }
  writer.finish();
}

}  // namespace switchyard
