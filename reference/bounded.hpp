#pragma once

// Numbers with an error bound: what the reference computes in double, and how far a computation in
// fp32 (with roundings to 16-bit types where the contract has them) may be from it.
//
// Every bound is a worst case over all orders of summation, in the usual model of floating point:
// fl(a op b) = (a op b)(1 + d), |d| <= u = 2^-24. A rounding to a 16-bit type is not bounded by its
// unit but followed: the computed value lies in [v - e, v + e], so its rounding lies between the
// roundings of the two ends. Mostly these are equal and the error is zero again, which is what
// keeps the bounds of bf16 as tight as those of fp32.

#include <bit>
#include <cmath>
#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard::reference {

/// Unit roundoff of fp32.
inline constexpr double kUnit = 0x1p-24;
/// What one operation may lose to underflow: units that flush subnormal operands to zero lose
/// 2^-126 times the other operand, here at most 2^16.
inline constexpr double kFlush = 0x1p-110;

struct Bounded {
  double value = 0;
  double error = 0;  ///< |computed - value| <= error.

  [[nodiscard]] double low() const { return value - error; }
  [[nodiscard]] double high() const { return value + error; }
};

/// gamma_n = n u / (1 - n u): relative error of n fp32 operations in a row.
[[nodiscard]] inline double gamma(std::int64_t n) {
  const double nu = static_cast<double>(n) * kUnit;
  return nu / (1.0 - nu);
}

/// `value` rounded to nearest, ties to even, as `dtype` (f32, bf16, f16, fp8); infinity beyond its
/// range. Written from the formats' definition: a multiple of the quantum of value's binade.
[[nodiscard]] inline double round_value(DType dtype, double value) {
  struct Format {
    int digits;
    int min_exponent;
    double max;
  };
  constexpr Format kF32{24, -126, 0x1.fffffep127};
  constexpr Format kBF16{8, -126, 0x1.fep127};
  constexpr Format kF16{11, -14, 65504.0};
  constexpr Format kF8E4M3{4, -6, 448.0};
  const Format& format = dtype == DType::kBF16     ? kBF16
                         : dtype == DType::kF16    ? kF16
                         : dtype == DType::kF8E4M3 ? kF8E4M3
                                                   : kF32;
  if (value == 0 || !std::isfinite(value)) return value;
  const auto field = static_cast<int>(std::bit_cast<std::uint64_t>(value) >> 52) & 0x7ff;
  int exponent = field - 1023;
  if (exponent < format.min_exponent) exponent = format.min_exponent;
  // Adding 1.5 * 2^52 quanta leaves no room for fractions of one: the sum is rounded to even.
  const auto quantum_field = static_cast<std::uint64_t>(exponent - (format.digits - 1) + 52 + 1023);
  const double shift = 1.5 * std::bit_cast<double>(quantum_field << 52);
  const double rounded = std::copysign((value + shift) - shift, value);  // -0, not 0.
  if (std::abs(rounded) > format.max) return std::copysign(HUGE_VAL, value);
  return rounded;
}

/// The result of one fp32 operation whose exact result is `exact`.
[[nodiscard]] inline Bounded rounded(Bounded exact) {
  return {exact.value,
          exact.error + kUnit * (std::abs(exact.value) + exact.error) * (1 + kUnit) + kFlush};
}

[[nodiscard]] inline Bounded add(Bounded a, Bounded b) {
  return rounded({a.value + b.value, a.error + b.error});
}

[[nodiscard]] inline Bounded multiply(Bounded a, Bounded b) {
  return rounded({a.value * b.value,
                  std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error});
}

/// An fp32 number converted to `dtype`.
[[nodiscard]] inline Bounded convert(DType dtype, Bounded number) {
  if (dtype == DType::kF32) return number;
  const double low = round_value(dtype, number.low());
  const double high = round_value(dtype, number.high());
  if (low == high) return {low, 0};
  return {0.5 * (low + high), 0.5 * (high - low)};
}

/// Whether `computed` is what an fp32 number within `number` may become in `dtype`. A bound that is
/// not finite (an overflow is possible) admits everything.
[[nodiscard]] inline bool admits(Bounded number, DType dtype, double computed) {
  if (!std::isfinite(number.error) || !std::isfinite(number.value)) return true;
  const double low = round_value(dtype, number.low());
  const double high = round_value(dtype, number.high());
  return low <= computed && computed <= high;
}

}  // namespace switchyard::reference
