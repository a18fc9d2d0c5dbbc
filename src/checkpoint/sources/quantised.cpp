// What is the same for all matrices that are stored as codes and scales, and which kind a
// checkpoint has.
#include "checkpoint/sources/quantised.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checkpoint/files/file_error.hpp"
#include "core/check.hpp"

namespace switchyard {

void QuantisedMatrices::read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                             std::int64_t num_rows, DType dtype, void* out) const {
  constexpr std::int64_t kRows = 32;
  check_read(config_, expert, part, first_row, num_rows, dtype);
  const StoredLayout most = layout_of(part, kRows);
  std::vector<std::byte> values(static_cast<std::size_t>(most.value_bytes()));
  std::vector<std::byte> scales(static_cast<std::size_t>(most.scale_bytes()));
  const StoredRows rows{values.data(), scales.data(), stored_factor(expert, part)};
  auto* to = static_cast<std::byte*>(out);
  for (std::int64_t row = 0; row < num_rows; row += kRows) {
    const StoredLayout some = layout_of(part, std::min(kRows, num_rows - row));
    read_stored(expert, part, first_row + row, some.rows, rows);
    decode(some, rows, dtype, to);
    to += some.rows * some.cols * size_of(dtype);
  }
}

void QuantisedMatrices::read_bias(std::int32_t /*expert*/, ExpertPart /*part*/,
                                  float* /*out*/) const {
  fail(ErrorCode::kInvalidArgument, "{}: these experts have no biases", tensors_->name());
}

const StoredTensor& QuantisedMatrices::at(const std::string& name,
                                          const std::vector<std::int64_t>& shape,
                                          StoredType type) const {
  const StoredTensor& found = tensors_->at(name, shape);
  require_file(found.spec.type == type, tensors_->name(), "tensor '{}' is {}, expected {}", name,
               to_string(found.spec.type), to_string(type));
  return found;
}

float QuantisedMatrices::positive(const std::string& name) const {
  const StoredTensor* found = tensors_->find(name);
  const bool is_scalar = found != nullptr && found->spec.shape.empty();
  const std::vector<std::int64_t> shape(is_scalar ? 0 : 1, 1);
  float value = 0;
  std::memcpy(&value, at(name, shape, StoredType::kF32).bytes.data(), sizeof value);
  require_file(std::isfinite(value) && value > 0, tensors_->name(),
               "tensor '{}' is {}, expected a number above 0", name, value);
  return value;
}

std::string module_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

std::unique_ptr<ExpertSource> make_expert_source(std::shared_ptr<const TensorSet> tensors,
                                                 const ExpertConfig& config,
                                                 const std::vector<ExpertTensorNames>& names,
                                                 GptqZeros zeros) {
  const std::string module = module_of(names.front().front());
  const StoredTensor* packed = tensors->find(module + ".weight_packed");
  const StoredTensor* weight = tensors->find(names.front().front());
  const auto is_u8 = [](const StoredTensor* tensor) {
    return tensor != nullptr && tensor->spec.type == StoredType::kU8;
  };
  if (is_u8(packed) || is_u8(weight)) return make_nvfp4_source(std::move(tensors), config, names);
  if (packed != nullptr || tensors->find(module + ".qweight") != nullptr) {
    return make_int4_source(std::move(tensors), config, names, zeros);
  }
  return make_matrix_source(std::move(tensors), config, names);
}

}  // namespace switchyard
