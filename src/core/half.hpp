#pragma once

// 16-bit floating point in plain integer arithmetic: the same bits on every machine and compiler.

#include <bit>
#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// Widening is exact; narrowing rounds to nearest, ties to even; NaN stays NaN.
[[nodiscard]] constexpr float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

[[nodiscard]] constexpr std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40U);  // quiet the NaN
  }
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

[[nodiscard]] constexpr float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16;
  const std::uint32_t magnitude = bits & 0x7fffU;
  if (magnitude >= 0x7c00U) {  // infinity or NaN
    return std::bit_cast<float>(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13));
  }
  if (magnitude >= 0x400U) {
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000U));
  }
  // Subnormal: magnitude * 2^-24, exact in float.
  const float value = static_cast<float>(magnitude) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

[[nodiscard]] constexpr std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // >= 65520
  if (magnitude >= 0x38800000U) {  // normal: rebias, then round the 13 bits that go
    const std::uint32_t rebiased = magnitude - 0x38000000U;
    return static_cast<std::uint16_t>(sign | ((rebiased + 0xfffU + ((rebiased >> 13) & 1U)) >> 13));
  }
  // Subnormal: adding 0.5 leaves round(value * 2^24) in the low bits, ties to even.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
  return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
}

/// Element `i` of a buffer of f32, bf16 or f16.
[[nodiscard]] inline float load_float(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

inline void store_float(void* data, DType dtype, std::int64_t i, float value) {
  if (dtype == DType::kF32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] =
        dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
  }
}

/// `value` as it is after a round trip through `dtype`.
[[nodiscard]] inline float round_to(DType dtype, float value) {
  switch (dtype) {
    case DType::kBF16: return bf16_to_float(float_to_bf16(value));
    case DType::kF16: return f16_to_float(float_to_f16(value));
    default: return value;
  }
}

}  // namespace switchyard
