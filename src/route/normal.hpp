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

/// What the polynomials are made of: memory of its own, which a GPU's instructions take operands
/// from.
struct NormalCoefficients {
  static constexpr double kPi = 3.14159265358979323846;
  static constexpr double kMost = kPi * kPi / (64 * 64);  ///< Of an angle's square.

  double half = 0.5;
  double two_thirds = 2.0 / 3;
  double angle = kPi * 0x1p-23;  ///< Of one of 2^24 parts of a turn.
  // cos - 1 to the fourth power, with the sixth's part nearest to these up to kMost.
  double cos_square = -0.5 + 9 * kMost * kMost / 11520;
  double cos_fourth = 1.0 / 24 - kMost / 480;
  double sin_cube = -1.0 / 6;
  double sin_fifth = 1.0 / 120;
  double offset = 0x1p52 + 0x1p31;  ///< Of numbers whose bits are put behind 2^52.
};

inline constexpr NormalCoefficients kNormalCoefficients{};

/// Of two words; of `tables` and `k` for where a GPU has them. Inlined, so that a caller for CPUs
/// with FMA has it as an instruction.
__attribute__((always_inline)) SWITCHYARD_HOST_DEVICE NormalPair normal_pair_of(
    std::uint32_t a, std::uint32_t b, const NormalTables& tables, const NormalCoefficients& k) {
  constexpr int kShift = 18;  // of 24 bits, to a part's number
  // u = (a's 24 bits + 1) / 2^24 = m * 2^-power, with m in [1, 2).
  const std::uint32_t u = (a >> 8) + 1;
#ifdef __CUDA_ARCH__
  const int zeros = __clz(static_cast<int>(u));
#else
  const int zeros = std::countl_zero(u);
#endif
  const std::uint32_t whole = u << zeros;  // m * 2^31
  const NormalTables::Point of_m = tables.log[((whole >> 24) + 1) / 2 - NormalTables::kParts];
  const double m =
      std::bit_cast<double>(std::uint64_t{1023} << 52 | std::uint64_t{whole << 1} << 20);
  // -2 log u = that of the power, of 1 / c and of 1 + r = m c.
  const double r = std::fma(m, of_m.x, -1.0);
  const double tail = std::fma(std::fma(r, k.half, -k.two_thirds), r, 1.0);
  const double head = std::fma(r, -2.0, tables.power[static_cast<std::size_t>(zeros - 7)] + of_m.y);
  const double radius = std::sqrt(std::fma(exact::times(r, r), tail, head));

  // The turn is a part's and a rest of at most 1/128 either way.
  const std::uint32_t turn = b >> 8;
  const std::uint32_t part = (turn + (1U << (kShift - 1))) >> kShift;
  const auto rest = static_cast<std::int32_t>(turn - (part << kShift));
  const NormalTables::Point at = tables.circle[part % NormalTables::kParts];
#ifdef __CUDA_ARCH__
  // A conversion takes as long as four additions.
  const double number = __hiloint2double(0x43300000, rest ^ INT32_MIN) - k.offset;
#else
  const double number = rest;
#endif
  const double angle = exact::times(number, k.angle);
  const double square = exact::times(angle, angle);
  const double less = exact::times(square, std::fma(square, k.cos_fourth, k.cos_square));
  const double sin =
      std::fma(exact::times(square, angle), std::fma(square, k.sin_fifth, k.sin_cube), angle);
  const double x = std::fma(-at.y, sin, std::fma(at.x, less, at.x));
  const double y = std::fma(at.x, sin, std::fma(at.y, less, at.y));
  return {static_cast<float>(exact::times(radius, x)), static_cast<float>(exact::times(radius, y))};
}

/// Where these are constants.
__attribute__((always_inline)) inline NormalPair normal_pair_of(std::uint32_t a, std::uint32_t b) {
  return normal_pair_of(a, b, kNormalTables, kNormalCoefficients);
}

}  // namespace switchyard
