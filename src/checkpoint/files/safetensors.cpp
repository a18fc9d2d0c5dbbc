// Reading: the header is checked whole before any tensor is handed out, so that no later access can
// leave the mapping.
#include "checkpoint/files/safetensors.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/json.hpp"

namespace switchyard {
namespace {

constexpr std::uint64_t kLengthBytes = 8;

std::uint64_t load_u64(const std::byte* data) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | std::to_integer<std::uint64_t>(data[i]);
  return value;
}

std::string_view header_of(std::span<const std::byte> bytes, const std::string& file) {
  require_file(bytes.size() >= kLengthBytes, file,
               "truncated: {} bytes, a safetensors file has at least 8", bytes.size());
  const std::uint64_t length = load_u64(bytes.data());
  require_file(length > 0, file, "header length is 0");
  require_file(length <= kMaxHeaderBytes, file, "header length {} exceeds {}", length,
               kMaxHeaderBytes);
  require_file(length <= bytes.size() - kLengthBytes, file,
               "truncated: header length {}, but {} bytes follow", length,
               bytes.size() - kLengthBytes);
  const auto* text = reinterpret_cast<const char*>(bytes.data() + kLengthBytes);
  return {text, length};
}

/// A whole number that fits an int64, or an error that names it.
std::int64_t whole_number(const Json& value, const std::string& file, const std::string& tensor,
                          const char* what) {
  require_file(value.is_number_unsigned() && value.get<std::uint64_t>() <= INT64_MAX, file,
               "tensor '{}': {} {} is not a whole number from 0 to 2^63-1", tensor, what,
               value.dump(-1, ' ', true, Json::error_handler_t::replace));
  return value.get<std::int64_t>();
}

/// One entry of the header.
StoredTensor parse_tensor(const std::string& name, const Json& entry,
                          std::span<const std::byte> data, const std::string& file) {
  require_file(entry.is_object() && entry.size() == 3 && entry.contains("dtype") &&
                   entry.contains("shape") && entry.contains("data_offsets"),
               file, "tensor '{}': needs exactly dtype, shape and data_offsets", name);
  StoredTensor tensor;
  tensor.spec.name = name;
  const Json& dtype = entry["dtype"];
  require_file(dtype.is_string(), file, "tensor '{}': dtype is not a string", name);
  const auto type = stored_type(dtype.get_ref<const std::string&>());
  require_file(type.has_value(), file, "tensor '{}': unknown dtype '{}'", name,
               dtype.get_ref<const std::string&>());
  tensor.spec.type = *type;

  const Json& shape = entry["shape"];
  require_file(shape.is_array(), file, "tensor '{}': shape is not a list", name);
  for (const Json& extent : shape) {
    tensor.spec.shape.push_back(whole_number(extent, file, name, "extent"));
  }
  const auto elements = num_elements(tensor.spec.shape);
  std::int64_t num_bytes = 0;
  require_file(elements && !__builtin_mul_overflow(*elements, size_of(*type), &num_bytes), file,
               "tensor '{}': shape {} overflows", name, shape_text(tensor.spec.shape));

  const Json& offsets = entry["data_offsets"];
  require_file(offsets.is_array() && offsets.size() == 2, file,
               "tensor '{}': data_offsets is not a pair", name);
  const std::int64_t begin = whole_number(offsets[0], file, name, "offset");
  const std::int64_t end = whole_number(offsets[1], file, name, "offset");
  require_file(begin <= end, file, "tensor '{}': data_offsets end {} before they begin {}", name,
               end, begin);
  require_file(end <= static_cast<std::int64_t>(data.size()), file,
               "truncated: tensor '{}' ends at byte {} of {} bytes of data", name, end,
               data.size());
  require_file(end - begin == num_bytes, file,
               "tensor '{}': {} {} needs {} bytes, data_offsets give {}", name, to_string(*type),
               shape_text(tensor.spec.shape), num_bytes, end - begin);
  tensor.bytes = data.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(num_bytes));
  return tensor;
}

void check_metadata(const Json& metadata, const std::string& file) {
  require_file(metadata.is_object(), file, "__metadata__ is not an object");
  for (const auto& [key, value] : metadata.items()) {
    require_file(value.is_string(), file, "__metadata__ '{}' is not a string", key);
  }
}

/// Tensors in the order of their bytes must touch each other and fill the data.
void check_cover(const std::vector<StoredTensor>& tensors, std::span<const std::byte> data,
                 const std::string& file) {
  const std::byte* expected = data.data();
  for (const StoredTensor& tensor : tensors) {
    require_file(tensor.bytes.data() >= expected, file, "tensor '{}' overlaps the one before it",
                 tensor.spec.name);
    require_file(tensor.bytes.data() == expected, file, "a gap of {} bytes before tensor '{}'",
                 tensor.bytes.data() - expected, tensor.spec.name);
    expected += tensor.bytes.size();
  }
  require_file(expected == data.data() + data.size(), file, "{} bytes after the last tensor",
               data.data() + data.size() - expected);
}

}  // namespace

std::vector<StoredTensor> parse_safetensors(std::span<const std::byte> bytes,
                                            const std::string& file) {
  const std::string_view header = header_of(bytes, file);
  const auto data = bytes.subspan(kLengthBytes + header.size());
  require_file(header.front() == '{', file, "header does not begin with '{{'");
  const Json json = parse_json(header, file);
  require_file(json.is_object(), file, "header is not a JSON object");

  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") {
      check_metadata(entry, file);
    } else {
      tensors.push_back(parse_tensor(name, entry, data, file));
    }
  }
  // Empty tensors before the one that starts at the same byte.
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return a.bytes.data() != b.bytes.data() ? a.bytes.data() < b.bytes.data()
                                            : a.bytes.size() < b.bytes.size();
  });
  check_cover(tensors, data, file);
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(MappedFile::open(path)), tensors_(parse_safetensors(file_->bytes(), file_->name())) {
  for (std::size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].spec.name] = i;
}

const StoredTensor* SafetensorsFile::find(std::string_view tensor) const {
  const auto found = index_.find(tensor);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

}  // namespace switchyard
