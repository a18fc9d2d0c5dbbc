#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "core/gpu/host_device.hpp"

namespace switchyard::exact {

// Functions of double by IEEE additions, multiplications, divisions and roots in one order, none of
// them contracted: the same bits on every CPU and GPU, where each library's log and cos differ in
// the last place. Good to about 2^-48, so what is rounded to float is nearly always the nearest. As
// constants they are a compiler's, with these bits too.

SWITCHYARD_HOST_DEVICE constexpr double times(double a, double b) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) return __dmul_rn(a, b);
#endif
  return a * b;
}

/// a * b + c in two roundings.
SWITCHYARD_HOST_DEVICE constexpr double times_plus(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) return __dadd_rn(__dmul_rn(a, b), c);
#endif
  return a * b + c;
}

/// Natural logarithm of a positive, normal number.
SWITCHYARD_HOST_DEVICE constexpr double log(double x) {
  // x = 2^power * m with m in [sqrt(1/2), sqrt(2)), and log m = 2 atanh((m - 1) / (m + 1)).
  constexpr std::uint64_t kFraction = (std::uint64_t{1} << 52) - 1;
  constexpr std::uint64_t kOne = std::uint64_t{1023} << 52;
  const auto bits = std::bit_cast<std::uint64_t>(x);
  auto power = static_cast<std::int32_t>(bits >> 52) - 1023;
  auto m = std::bit_cast<double>((bits & kFraction) | kOne);
  if (m >= 1.4142135623730951) {
    m = times(m, 0.5);
    ++power;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double square = times(s, s);
  double sum = 1.0 / 17;
  sum = times_plus(sum, square, 1.0 / 15);
  sum = times_plus(sum, square, 1.0 / 13);
  sum = times_plus(sum, square, 1.0 / 11);
  sum = times_plus(sum, square, 1.0 / 9);
  sum = times_plus(sum, square, 1.0 / 7);
  sum = times_plus(sum, square, 1.0 / 5);
  sum = times_plus(sum, square, 1.0 / 3);
  sum = times_plus(sum, square, 1.0);
  return times_plus(static_cast<double>(power), 0.69314718055994531, times(times(2.0, s), sum));
}

/// cos(2 pi turn), or sin, for 0 <= turn <= 1.
SWITCHYARD_HOST_DEVICE constexpr double cos_or_sin(double turn, bool sin) {
  // A quarter turn less its nearest multiple is exact.
  const auto quarter = static_cast<std::int32_t>(times_plus(4.0, turn, 0.5));
  const double angle = times(times_plus(4.0, turn, -quarter), 1.5707963267948966);
  const double square = times(angle, angle);
  // Which of the two series this quarter needs, and its sign.
  const std::int32_t place = (sin ? quarter + 3 : quarter) % 4;
  double sum = 0;
  if (place % 2 == 0) {
    sum = 1.0 / 20922789888000;
    sum = times_plus(sum, square, -1.0 / 87178291200);
    sum = times_plus(sum, square, 1.0 / 479001600);
    sum = times_plus(sum, square, -1.0 / 3628800);
    sum = times_plus(sum, square, 1.0 / 40320);
    sum = times_plus(sum, square, -1.0 / 720);
    sum = times_plus(sum, square, 1.0 / 24);
    sum = times_plus(sum, square, -0.5);
    sum = times_plus(sum, square, 1.0);
  } else {
    sum = -1.0 / 1307674368000;
    sum = times_plus(sum, square, 1.0 / 6227020800);
    sum = times_plus(sum, square, -1.0 / 39916800);
    sum = times_plus(sum, square, 1.0 / 362880);
    sum = times_plus(sum, square, -1.0 / 5040);
    sum = times_plus(sum, square, 1.0 / 120);
    sum = times_plus(sum, square, -1.0 / 6);
    sum = times_plus(sum, square, 1.0);
    sum = times(sum, angle);
  }
  // cos of a quarter more is -sin, of two quarters more -cos, of three sin.
  return place == 1 || place == 2 ? -sum : sum;
}

}  // namespace switchyard::exact
