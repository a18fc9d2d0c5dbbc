#include "checkpoint/files/stored_type.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>

namespace switchyard {
namespace {

struct StoredTypeRow {
  StoredType type;
  std::string_view name;
  std::int64_t bytes;
  std::optional<DType> dtype;
};

constexpr std::array<StoredTypeRow, 16> kStoredTypes = {{
    {StoredType::kBool, "BOOL", 1, {}},
    {StoredType::kU8, "U8", 1, DType::kU8},
    {StoredType::kI8, "I8", 1, {}},
    {StoredType::kF8E4M3, "F8_E4M3", 1, DType::kF8E4M3},
    {StoredType::kF8E5M2, "F8_E5M2", 1, {}},
    {StoredType::kF8E8M0, "F8_E8M0", 1, {}},
    {StoredType::kU16, "U16", 2, {}},
    {StoredType::kI16, "I16", 2, {}},
    {StoredType::kF16, "F16", 2, DType::kF16},
    {StoredType::kBF16, "BF16", 2, DType::kBF16},
    {StoredType::kU32, "U32", 4, {}},
    {StoredType::kI32, "I32", 4, DType::kI32},
    {StoredType::kF32, "F32", 4, DType::kF32},
    {StoredType::kU64, "U64", 8, {}},
    {StoredType::kI64, "I64", 8, DType::kI64},
    {StoredType::kF64, "F64", 8, DType::kF64},
}};

const StoredTypeRow& row(StoredType type) { return kStoredTypes[static_cast<std::size_t>(type)]; }

}  // namespace

std::string_view to_string(StoredType type) { return row(type).name; }
std::int64_t size_of(StoredType type) { return row(type).bytes; }
std::optional<DType> dtype_of(StoredType type) { return row(type).dtype; }

std::optional<StoredType> stored_type(std::string_view name) {
  for (const StoredTypeRow& candidate : kStoredTypes) {
    if (candidate.name == name) return candidate.type;
  }
  return {};
}

StoredType stored_type(DType dtype) {
  StoredType found = StoredType::kU8;
  for (const StoredTypeRow& candidate : kStoredTypes) {
    if (candidate.dtype == dtype) found = candidate.type;  // every DType has its row
  }
  return found;
}

bool is_float(StoredType type) {
  return type == StoredType::kF32 || type == StoredType::kBF16 || type == StoredType::kF16;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::optional<std::int64_t> num_elements(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return {};
  }
  return product;
}

}  // namespace switchyard
