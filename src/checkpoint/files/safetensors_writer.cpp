#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>
#include <unordered_set>

#include "checkpoint/files/json.hpp"
#include "checkpoint/files/safetensors.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

/// Of the tensors as they were given, larger elements first.
std::vector<std::size_t> in_file_order(std::span<const TensorSpec> tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(tensors[a].type) > size_of(tensors[b].type);
  });
  return order;
}

/// Length and JSON, padded with spaces to a multiple of 8 bytes: the data starts aligned. An entry
/// is written at a time: an ordered object of all would look for each name among those before it.
std::string header_text(std::span<const TensorSpec> tensors, std::span<const std::size_t> order) {
  std::unordered_set<std::string_view> names;
  std::string text = "{";
  std::int64_t offset = 0;
  for (const std::size_t index : order) {
    const TensorSpec& tensor = tensors[index];
    require(names.insert(tensor.name).second, "two tensors are named '{}'", tensor.name);
    const std::int64_t end = offset + tensor.num_bytes();
    const nlohmann::ordered_json entry = {{"dtype", to_string(tensor.type)},
                                          {"shape", tensor.shape},
                                          {"data_offsets", {offset, end}}};
    if (text.size() > 1) text += ',';
    text += Json(tensor.name).dump() + ':' + entry.dump();
    offset = end;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  require(text.size() <= kMaxHeaderBytes,
          "the header of {} tensors has {} bytes, more than the {} that are read", tensors.size(),
          text.size(), kMaxHeaderBytes);
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) {
    length[i] = static_cast<char>(text.size() >> (8 * i) & 0xffU);
  }
  return length + text;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(AtomicFile& file, std::span<const TensorSpec> tensors)
    : order_(in_file_order(tensors)), file_(file) {
  file_.write(header_text(tensors, order_));
  for (const TensorSpec& tensor : tensors) missing_ += tensor.num_bytes();
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  missing_ -= static_cast<std::int64_t>(bytes.size());
  require(missing_ >= 0, "{} bytes more than the tensors have", -missing_);
  file_.write(bytes);
}

void SafetensorsWriter::finish() {
  require(missing_ == 0, "{} bytes of the tensors are missing", missing_);
  file_.finish();
}

void write_safetensors(const std::filesystem::path& path, std::span<const StoredTensor> tensors) {
  std::vector<TensorSpec> specs;
  for (const StoredTensor& tensor : tensors) specs.push_back(tensor.spec);
  AtomicFile file(path);
  SafetensorsWriter writer(file, specs);
  for (const std::size_t index : writer.order()) {
    const auto& [spec, bytes] = tensors[index];
    require(static_cast<std::int64_t>(bytes.size()) == spec.num_bytes(),
            "tensor '{}' has {} bytes, its shape needs {}", spec.name, bytes.size(),
            spec.num_bytes());
    writer.append(bytes);
  }
  writer.finish();
  file.commit();
}

}  // namespace switchyard
