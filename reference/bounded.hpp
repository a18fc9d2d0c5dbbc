#pragma once

// Numbers with an error bound: what the reference computes in double, and how far a computation in
// fp32 (with roundings to 16-bit types where the contract has them) may be from it.
//
// Every bound is a worst case over all orders of summation, in the usual model of floating point:
// fl(a op b) = (a op b)(1 + d), |d| <= u = 2^-24. A rounding to a 16-bit type is not bounded by its
// unit but followed: the computed value lies in [v - e, v + e], so its rounding lies between the
// roundings of the two ends. Mostly these are equal and the error is zero again, which is what
// keeps the bounds of bf16 as tight as those of fp32.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "switchyard/tensor.hpp"

namespace switchyard::reference {

/// Unit roundoff of fp32.
inline constexpr double kUnit = 0x1p-24;
/// What one operation may lose to underflow: units that flush subnormal operands to zero lose
/// 2^-126 times the other operand, here at most 2^16.
inline constexpr double kFlush = 0x1p-110;

/// Largest finite fp32 number.
inline constexpr double kLargest = 0x1.fffffep127;

/// A number as some fp32 computation has it. Where all is finite, |computed - value| <= error.
/// Error infinite: an operation may overflow, and computed is any number, infinity or NaN. Value
/// not finite: one overflows in every order of summation, and computed is infinite or NaN.
struct Bounded {
  double value = 0;
  double error = 0;

  [[nodiscard]] bool overflows() const { return !std::isfinite(value); }
  [[nodiscard]] bool may_overflow() const { return overflows() || !std::isfinite(error); }

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

/// A number of fp32 that may lie, or is sure to lie, beyond what fp32 can hold. `partial` is the
/// largest magnitude on the way to it.
[[nodiscard]] inline Bounded in_range(Bounded number, double partial) {
  if (std::max(std::abs(number.value) + number.error, partial) < kLargest) return number;
  if (number.overflows()) return {number.value, 0};
  if (number.may_overflow()) return {number.value, HUGE_VAL};
  const double low = round_value(DType::kF32, number.low());
  const double high = round_value(DType::kF32, number.high());
  if (low == HUGE_VAL || high == -HUGE_VAL) return {low == HUGE_VAL ? low : high, 0};
  if (std::max({std::abs(low), std::abs(high), partial}) > kLargest) {
    return {number.value, HUGE_VAL};
  }
  return number;
}

/// The result of one fp32 operation whose exact result is `exact`.
[[nodiscard]] inline Bounded rounded(Bounded exact) {
  return in_range(
      {exact.value,
       exact.error + kUnit * (std::abs(exact.value) + exact.error) * (1 + kUnit) + kFlush},
      0);
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
  if (dtype == DType::kF32 || number.may_overflow()) return number;
  const double low = round_value(dtype, number.low());
  const double high = round_value(dtype, number.high());
  if (low == high) return {low, 0};
  if (!std::isfinite(low) || !std::isfinite(high)) return {number.value, HUGE_VAL};
  return {0.5 * (low + high), 0.5 * (high - low)};
}

/// An fp32 number that some implementations convert to `dtype` and others leave as it is.
[[nodiscard]] inline Bounded perhaps_converted(DType dtype, Bounded number) {
  const Bounded converted = convert(dtype, number);
  if (number.may_overflow()) return number;
  if (converted.may_overflow()) return {number.value, HUGE_VAL};
  const double low = std::min(number.low(), converted.low());
  const double high = std::max(number.high(), converted.high());
  return {0.5 * (low + high), 0.5 * (high - low)};
}

/// A sum of numbers and products of fp32 operations in any order: n terms are at most n + 3
/// roundings deep, gamma_{n+3} times the sum of magnitudes. Errors of the terms add.
/// `operands`: what the factors of products are stored in. A tensor core does not normalise those
/// of f16 that are below its smallest normal number, 2^-14: it aligns the products of a sum as if
/// they were that large, and cuts them off 24 bits below the largest.
class BoundedSum {
 public:
  explicit BoundedSum(DType operands = DType::kF32) : f16_(operands == DType::kF16) {}

  void add(Bounded a) {
    value_ += a.value;
    magnitude_ += std::abs(a.value);
    error_ += a.error;
    ++terms_;
  }
  void add(Bounded a, Bounded b) {
    const double product = a.value * b.value;
    value_ += product;
    magnitude_ += std::abs(product);
    error_ += std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error;
    ++terms_;
    if (f16_) align(std::abs(a.value) + a.error, std::abs(b.value) + b.error);
  }
  /// Of no terms exactly 0.
  [[nodiscard]] Bounded total() const {
    if (terms_ == 0) return {};
    const std::int64_t depth = terms_ + 3;
    const double most = magnitude_ + error_;
    const double error = error_ + gamma(depth) * most + kFlush * static_cast<double>(depth) +
                         static_cast<double>(terms_) * kUnit * aligned_;
    return in_range({value_, error}, most);
  }

 private:
  void align(double a, double b) {
    constexpr double kSmallest = 0x1p-14;
    if (a == 0 || b == 0 || (a >= kSmallest && b >= kSmallest)) return;
    aligned_ = std::max(aligned_, std::max(a, kSmallest) * std::max(b, kSmallest));
  }

  bool f16_;
  double aligned_ = 0;  ///< The largest product that such a factor was aligned as.
  double value_ = 0;
  double magnitude_ = 0;
  double error_ = 0;
  std::int64_t terms_ = 0;
};

[[nodiscard]] inline std::vector<Bounded> totals(const std::vector<BoundedSum>& sums) {
  std::vector<Bounded> result;
  result.reserve(sums.size());
  for (const BoundedSum& sum : sums) result.push_back(sum.total());
  return result;
}

/// Whether `computed` is what an fp32 number within `number` may become in `dtype`. Infinity only
/// where the bound reaches beyond the type's range, NaN only where an operation before may
/// overflow.
[[nodiscard]] inline bool admits(Bounded number, DType dtype, double computed) {
  if (number.overflows()) return !std::isfinite(computed);
  if (number.may_overflow()) return true;
  const double low = round_value(dtype, number.low());
  const double high = round_value(dtype, number.high());
  return low <= computed && computed <= high;
}

}  // namespace switchyard::reference
