#pragma once

// 8-bit floating point (e4m3: 1 sign, 4 exponent, 3 mantissa bits; no infinity) in plain integer
// arithmetic, as the conversion instructions of GPUs have it.

#include <bit>
#include <cstdint>

namespace switchyard {

inline constexpr float kE4M3Max = 448.0F;

/// Rounds to nearest, ties to even; too large a value becomes the largest; NaN stays NaN.
[[nodiscard]] constexpr std::uint8_t float_to_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint8_t>(sign | 0x7fU);
  if (magnitude >= 0x43e00000U) return static_cast<std::uint8_t>(sign | 0x7eU);  // >= 448
  if (magnitude >= 0x3c800000U) {  // normal, >= 2^-6: rebias, then round the 20 bits that go
    const std::uint32_t rebiased = magnitude - 0x3c000000U;
    return static_cast<std::uint8_t>(sign |
                                     ((rebiased + 0x7ffffU + ((rebiased >> 20) & 1U)) >> 20));
  }
  // Subnormal: adding 2^14 leaves round(value * 2^9) in the low bits, ties to even.
  const float shifted = std::bit_cast<float>(magnitude) + 16384.0F;
  return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x46800000U));
}

[[nodiscard]] constexpr float e4m3_to_float(std::uint8_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x80U} << 24;
  const std::uint32_t magnitude = bits & 0x7fU;
  if (magnitude == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  if (magnitude >= 8U) return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000U));
  const float value = static_cast<float>(magnitude) * 0x1p-9F;  // subnormal, exact
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

}  // namespace switchyard
