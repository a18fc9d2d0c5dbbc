#include "models/training/tensor_files.hpp"

#include <cmath>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "core/row_ops.hpp"

namespace switchyard::models {
namespace {

std::int64_t first_non_finite(const float* data, std::int64_t size) {
  for (std::int64_t i = 0; i < size; ++i) {
    if (!std::isfinite(data[i])) return i;
  }
  return -1;
}

void load_part(const SafetensorsFile& file, const std::string& name, const TensorPart& part,
               float* out) {
  const StoredTensor* found = file.find(name);
  require_file(found != nullptr, file.name(), "has no tensor '{}'", name);
  require_file(found->spec.shape == part.shape, file.name(),
               "tensor '{}' has shape {}, the model's has {}", name, shape_text(found->spec.shape),
               shape_text(part.shape));
  require_file(is_float(found->spec.type), file.name(),
               "tensor '{}' is {}, expected F32, BF16 or F16", name, to_string(found->spec.type));
  row_ops::widen(*dtype_of(found->spec.type), found->bytes.data(), out, part.size());
  const std::int64_t bad = first_non_finite(out, part.size());
  require_file(bad < 0, file.name(), "tensor '{}' has {} at {}", name, bad < 0 ? 0.0F : out[bad],
               bad);
}

}  // namespace

void append_values(std::vector<NamedNumbers>& numbers, std::span<const ParameterTensor> tensors) {
  for (const ParameterTensor& tensor : tensors) numbers.push_back({&tensor, tensor.value, ""});
}

std::vector<NamedNumbers> values_of(std::span<const ParameterTensor> tensors) {
  std::vector<NamedNumbers> numbers;
  append_values(numbers, tensors);
  return numbers;
}

std::vector<StoredTensor> stored_parts(std::span<const NamedNumbers> numbers) {
  std::vector<StoredTensor> parts;
  for (const NamedNumbers& entry : numbers) {
    for (const TensorPart& part : entry.tensor->parts) {
      const std::span<const float> values(entry.data + part.offset,
                                          static_cast<std::size_t>(part.size()));
      parts.push_back(
          {{entry.prefix + part.name, StoredType::kF32, part.shape}, std::as_bytes(values)});
    }
  }
  return parts;
}

std::set<std::string> names_of(std::span<const NamedNumbers> numbers) {
  std::set<std::string> names;
  for (const NamedNumbers& entry : numbers) {
    for (const TensorPart& part : entry.tensor->parts) names.insert(entry.prefix + part.name);
  }
  return names;
}

void load_parts(std::span<const NamedNumbers> numbers, const std::filesystem::path& path,
                const std::set<std::string>& others) {
  const SafetensorsFile file(path);
  std::set<std::string> known = others;
  known.merge(names_of(numbers));
  for (const NamedNumbers& entry : numbers) {
    for (const TensorPart& part : entry.tensor->parts) {
      load_part(file, entry.prefix + part.name, part, entry.data + part.offset);
    }
  }
  for (const StoredTensor& tensor : file.tensors()) {
    require_file(known.contains(tensor.spec.name), file.name(),
                 "tensor '{}' is none of this model's", tensor.spec.name);
  }
}

}  // namespace switchyard::models
