#pragma once

// MXFP4: blocks of 32 four-bit values (E2M1) with one power of two (E8M0) for all of them.
// Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 5.4.

#include <array>
#include <bit>
#include <cstdint>

#include "switchyard/weight_format.hpp"

namespace switchyard {

/// Of the values of a block: two a byte, the first in the low half.
inline constexpr std::int64_t kMxfp4BlockBytes = kMxfp4Block / 2;

/// 2^(bits - 127); 0xff is NaN. Exact (0 is a subnormal float).
[[nodiscard]] constexpr float e8m0_to_float(std::uint8_t bits) {
  if (bits == 0xffU) return std::bit_cast<float>(0x7fc00000U);
  return std::bit_cast<float>(bits == 0 ? 0x00400000U : std::uint32_t{bits} << 23);
}

/// The value of each E2M1 code.
inline constexpr std::array<float, 16> kE2M1 = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                -2.0F, -3.0F, -4.0F, -6.0F};

}  // namespace switchyard
