#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "core/gpu/host_device.hpp"
#include "route/exact_math.hpp"

namespace switchyard {

// Normal numbers, two of two words (Box, Muller 1958): sqrt(-2 log u) times cos and sin of a turn
// v. Logarithm and circle begin at the nearest of 64 points of a table, so that short polynomials
// do: some 30 operations in double for both numbers. Each is one of IEEE, so a CPU and a GPU have
// the same bits; one float in 50000 is not the nearest, but the next.

struct NormalTables {
  static constexpr int kParts = 64;
  struct Point {
    double x, y;
  };
  std::array<Point, kParts + 1> log{};  ///< c next to 1 / (1 + j / 64), and 2 log c.
  std::array<double, 25> power{};       ///< -2 log(2^-j).
  std::array<Point, kParts> circle{};   ///< cos and sin of j / 64 of a turn.
};

constexpr NormalTables make_normal_tables() {
  NormalTables tables;
  for (int j = 0; j <= NormalTables::kParts; ++j) {
    const double c = 1.0 / (1.0 + j * (1.0 / NormalTables::kParts));
    tables.log[static_cast<std::size_t>(j)] = {c, 2.0 * exact::log(c)};
  }
  for (int j = 0; j < 25; ++j) {
    tables.power[static_cast<std::size_t>(j)] = -2.0 * j * exact::log(0.5);
  }
  for (int j = 0; j < NormalTables::kParts; ++j) {
    const double turn = j * (1.0 / NormalTables::kParts);
    tables.circle[static_cast<std::size_t>(j)] = {exact::cos_or_sin(turn, false),
                                                  exact::cos_or_sin(turn, true)};
  }
  return tables;
}

inline constexpr NormalTables kNormalTables = make_normal_tables();

struct NormalPair {
  float first, second;
};

/// Of two words; of `tables` for where a GPU has them. Inlined, so that a caller for CPUs with FMA
/// has it as an instruction.
__attribute__((always_inline)) SWITCHYARD_HOST_DEVICE NormalPair
normal_pair_of(std::uint32_t a, std::uint32_t b, const NormalTables& tables) {
  constexpr int kShift = 18;  // of 24 bits, to a part's number
  // u = (a's 24 bits + 1) / 2^24 = m * 2^-power, with m in [1, 2).
  const std::uint32_t u = (a >> 8) + 1;
#ifdef __CUDA_ARCH__
  const int zeros = __clz(static_cast<int>(u));
#else
  const int zeros = std::countl_zero(u);
#endif
  const std::uint32_t fraction = u << zeros << 1;  // of m, 32 bits
  const NormalTables::Point of_m =
      tables.log[(std::uint64_t{fraction} + (std::uint64_t{1} << 25)) >> 26];
  const double m = std::bit_cast<double>(std::uint64_t{1023} << 52 | std::uint64_t{fraction} << 20);
  // -2 log u = that of the power, of 1 / c and of 1 + r = m c.
  const double r = std::fma(m, of_m.x, -1.0);
  const double sum = std::fma(std::fma(r, 0.5, -2.0 / 3), r, 1.0);
  const double whole =
      std::fma(r, -2.0, tables.power[static_cast<std::size_t>(zeros - 7)] + of_m.y);
  const double radius = std::sqrt(std::fma(exact::times(r, r), sum, whole));

  // The turn is a part's and a rest of at most 1/128 either way.
  const std::uint32_t turn = b >> 8;
  const std::uint32_t part = (turn + (1U << (kShift - 1))) >> kShift;
  const auto rest = static_cast<std::int32_t>(turn - (part << kShift));
  const NormalTables::Point at = tables.circle[part % NormalTables::kParts];
  constexpr double kPi = 3.14159265358979323846;
#ifdef __CUDA_ARCH__
  // A conversion takes as long as four additions.
  const double number = __hiloint2double(0x43300000, rest ^ INT32_MIN) - (0x1p52 + 0x1p31);
#else
  const double number = rest;
#endif
  const double angle = exact::times(number, kPi * 0x1p-23);
  const double square = exact::times(angle, angle);
  // cos - 1 to the fourth power, with the sixth's part nearest to these up to kMost.
  constexpr double kMost = kPi * kPi / (64 * 64);
  constexpr double kSquare = -0.5 + 9 * kMost * kMost / 11520;
  constexpr double kFourth = 1.0 / 24 - kMost / 480;
  const double less = exact::times(square, std::fma(square, kFourth, kSquare));
  const double sin =
      std::fma(exact::times(square, angle), std::fma(square, 1.0 / 120, -1.0 / 6), angle);
  const double x = std::fma(-at.y, sin, std::fma(at.x, less, at.x));
  const double y = std::fma(at.x, sin, std::fma(at.y, less, at.y));
  return {static_cast<float>(exact::times(radius, x)), static_cast<float>(exact::times(radius, y))};
}

}  // namespace switchyard
