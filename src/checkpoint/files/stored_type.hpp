#pragma once

// Element types as safetensors files spell them, and how they meet the library's own DType.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/tensor.hpp"

namespace switchyard {

// clang-format off
enum class StoredType : std::uint8_t {
  kBool, kU8, kI8, kF8E4M3, kF8E5M2, kF8E8M0, kU16, kI16, kF16, kBF16, kU32, kI32, kF32, kU64,
  kI64, kF64,
};
// clang-format on

[[nodiscard]] std::string_view to_string(StoredType type);
[[nodiscard]] std::int64_t size_of(StoredType type);
[[nodiscard]] std::optional<StoredType> stored_type(std::string_view name);
[[nodiscard]] StoredType stored_type(DType dtype);
/// Empty where the library has no such DType.
[[nodiscard]] std::optional<DType> dtype_of(StoredType type);
[[nodiscard]] bool is_float(StoredType type);  ///< F32, BF16 or F16: what stages compute on.

/// "[2, 3]".
[[nodiscard]] std::string shape_text(const std::vector<std::int64_t>& shape);
/// Product of the extents; empty if one is negative or the product overflows.
[[nodiscard]] std::optional<std::int64_t> num_elements(const std::vector<std::int64_t>& shape);

}  // namespace switchyard
