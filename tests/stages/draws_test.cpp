// The random numbers of routers: what their logarithms and cosines are made of.
#include "route/draws.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <random>

#include "route/normal.hpp"

namespace switchyard {
namespace {

/// Within a float's last place of the exact number, and nearly always the nearest float.
void expect_nearest(const auto& of_draw, const auto& exact) {
  std::mt19937 random(3);
  int beside = 0;
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    const auto a = static_cast<std::uint32_t>(random());
    const auto b = static_cast<std::uint32_t>(random());
    const float have = of_draw(a, b);
    const auto want = static_cast<float>(exact(a, b));
    ASSERT_LE(std::abs(have - want), 1.2e-7F * std::abs(want) + 1e-12F) << a << " " << b;
    beside += have == want ? 0 : 1;
  }
  EXPECT_LE(beside, kDraws / 1000);
}

float first_of(std::uint32_t a, std::uint32_t b) { return normal_pair_of(a, b).first; }
float second_of(std::uint32_t a, std::uint32_t b) { return normal_pair_of(a, b).second; }

double unit(std::uint32_t word) { return static_cast<double>(word >> 8U) * 0x1p-24; }

TEST(Draws, NormalNumbersAreTheNearestFloatsOfTheirFormula) {
  const auto radius = [](std::uint32_t a) { return std::sqrt(-2 * std::log(unit(a) + 0x1p-24)); };
  const auto angle = [](std::uint32_t b) { return 2 * std::numbers::pi * unit(b); };
  expect_nearest(first_of, [&](auto a, auto b) { return radius(a) * std::cos(angle(b)); });
  expect_nearest(second_of, [&](auto a, auto b) { return radius(a) * std::sin(angle(b)); });
}

TEST(Draws, GumbelNumbersAreTheNearestFloatsOfTheirFormula) {
  expect_nearest([](auto a, auto /*b*/) { return gumbel_of(unit_of(a)); },
                 [](auto a, auto /*b*/) { return -std::log(-std::log(unit(a) + 0x1p-25)); });
}

TEST(Draws, EveryWordGivesAFiniteNumber) {
  for (const std::uint32_t a : {0U, 0xffU, 0x100U, 0x80000000U, 0xfffffeffU, 0xffffff00U, ~0U}) {
    EXPECT_TRUE(std::isfinite(gumbel_of(unit_of(a)))) << a;
    for (const std::uint32_t b : {0U, 0x20000000U, 0x40000000U, 0x80000000U, 0xc0000000U, ~0U}) {
      EXPECT_TRUE(std::isfinite(first_of(a, b))) << a << " " << b;
      EXPECT_TRUE(std::isfinite(second_of(a, b))) << a << " " << b;
    }
  }
  EXPECT_EQ(first_of(~0U, 0), 0.0F);  // the largest unit: radius 0
}

TEST(Draws, NormalNumbersNextToTheBordersOfTheirTablesAreTheNearestToo) {
  // Units and turns half a part beside the points of the tables, and those near 1 and 0.
  const auto radius = [](std::uint32_t a) { return std::sqrt(-2 * std::log(unit(a) + 0x1p-24)); };
  for (std::uint32_t part = 0; part < 256; ++part) {
    for (const std::uint32_t beside : {0U, 1U, 2U, 0xfffeU, 0xffffU}) {
      const std::uint32_t word = (part << 16U | beside) << 8U;
      for (const std::uint32_t a : {word, word >> 7U, ~word >> 15U}) {
        const double angle = 2 * std::numbers::pi * unit(word);
        const double want[] = {radius(a) * std::cos(angle), radius(a) * std::sin(angle)};
        // Where the reference itself cancels: pi is rounded there.
        const double rounding = 4e-16 * radius(a);
        ASSERT_NEAR(first_of(a, word), want[0], 6e-8 * std::abs(want[0]) + rounding) << a << word;
        ASSERT_NEAR(second_of(a, word), want[1], 6e-8 * std::abs(want[1]) + rounding) << a << word;
      }
    }
  }
}

TEST(Draws, QuartersOfATurnAreExact) {
  EXPECT_EQ(first_of(0, 0x40000000), 0.0F);
  EXPECT_EQ(second_of(0, 0x80000000), 0.0F);
  EXPECT_EQ(exact::cos_or_sin(0, false), 1.0);
  EXPECT_EQ(exact::cos_or_sin(0.25, true), 1.0);
  EXPECT_EQ(exact::cos_or_sin(0.5, false), -1.0);
  EXPECT_EQ(exact::cos_or_sin(0.75, true), -1.0);
  EXPECT_EQ(exact::cos_or_sin(0.25, false), 0.0);
  EXPECT_EQ(exact::cos_or_sin(0.5, true), 0.0);
}

}  // namespace
}  // namespace switchyard
