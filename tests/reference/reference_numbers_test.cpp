#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/half.hpp"
#include "reference/bounded.hpp"
#include "reference/expert.hpp"

namespace switchyard::reference {
namespace {

TEST(ReferenceNumbers, RoundAsTheFormatsDo) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const float value = dtype == DType::kBF16 ? bf16_to_float(half) : f16_to_float(half);
      if (std::isnan(value) || std::abs(value) > 3e38F) continue;
      ASSERT_EQ(round_value(dtype, value), value);
      const float between = value * (1 + 0x1p-10F) + 0x1.8p-26F;
      ASSERT_EQ(round_value(dtype, between), round_to(dtype, between)) << value;
    }
  }
  EXPECT_EQ(round_value(DType::kF16, 65519.0), 65504.0);
  EXPECT_EQ(round_value(DType::kF16, 65520.0), HUGE_VAL);
  EXPECT_EQ(round_value(DType::kF16, -1e9), -HUGE_VAL);
  EXPECT_EQ(round_value(DType::kBF16, 1.00390625), 1.0);       // Halfway, even below.
  EXPECT_EQ(round_value(DType::kBF16, 1.01171875), 1.015625);  // Halfway, even above.
  EXPECT_TRUE(std::signbit(round_value(DType::kF16, -1e-9)));
  EXPECT_EQ(round_value(DType::kF8E4M3, 17.0), 16.0);
  EXPECT_EQ(round_value(DType::kF8E4M3, 0x1p-10), 0.0);
}

TEST(ReferenceNumbers, ANumberNearARoundingBorderMayGoEitherWay) {
  const Bounded border{1.00390625, 1e-7};  // Between 1 and 1.0078125 in bf16.
  EXPECT_TRUE(admits(border, DType::kBF16, 1.0));
  EXPECT_TRUE(admits(border, DType::kBF16, 1.0078125));
  EXPECT_FALSE(admits(border, DType::kBF16, 1.015625));
  EXPECT_FALSE(admits(border, DType::kBF16, std::nan("")));
  EXPECT_FALSE(admits({1.002, 1e-7}, DType::kBF16, 1.0078125));
}

TEST(ReferenceNumbers, NaNAndInfinityAreWithinNoFiniteBound) {
  const double nan = std::nan("");
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    EXPECT_TRUE(admits({1.0, 1e-7}, dtype, 1.0));
    for (const double computed : {nan, HUGE_VAL, -HUGE_VAL}) {
      EXPECT_FALSE(admits({1.0, 1e-7}, dtype, computed)) << computed;
      EXPECT_FALSE(admits({1e3, 1e3}, dtype, computed)) << computed;
    }
  }
}

TEST(ReferenceNumbers, WhatIsBeyondATypeIsInfiniteThere) {
  EXPECT_TRUE(admits({7e4, 1.0}, DType::kF16, HUGE_VAL));
  for (const double computed : {-HUGE_VAL, 65504.0, std::nan("")}) {
    EXPECT_FALSE(admits({7e4, 1.0}, DType::kF16, computed)) << computed;
  }
  EXPECT_FALSE(admits({7e4, 1.0}, DType::kBF16, HUGE_VAL));
  EXPECT_TRUE(admits({65520.0, 8.0}, DType::kF16, HUGE_VAL));  // either side of the border
  EXPECT_TRUE(admits({65520.0, 8.0}, DType::kF16, 65504.0));
  EXPECT_FALSE(admits({65520.0, 8.0}, DType::kF16, std::nan("")));
  EXPECT_TRUE(admits({4e38, 1e30}, DType::kF32, HUGE_VAL));
}

TEST(ReferenceNumbers, BehindAnOverflowNothingIsKnownAndBehindACertainOneNothingIsFinite) {
  const Bounded certain = convert(DType::kF16, {7e4, 1.0});
  const Bounded possible = convert(DType::kF16, {65520.0, 8.0});
  const Bounded weight{-2.0, 0.125};
  for (const Bounded& number :
       {certain, add(certain, possible), add(certain, multiply(certain, weight)),
        multiply(certain, {0.0, 0.0}), rounded({4e38, 1e30}), multiply({3e38, 1}, {-3, 0})}) {
    EXPECT_TRUE(number.overflows());
    EXPECT_TRUE(admits(number, DType::kF32, std::nan("")));
    EXPECT_TRUE(admits(number, DType::kF32, -HUGE_VAL));
    EXPECT_FALSE(admits(number, DType::kF32, 1.0));
  }
  for (const Bounded& number :
       {possible, add(possible, weight), multiply(possible, {0.0, 0.0}),
        convert(DType::kF16, multiply(possible, weight)), rounded({3.4e38, 1e37})}) {
    EXPECT_FALSE(number.overflows());
    for (const double computed : {1.0, HUGE_VAL, std::nan("")}) {
      EXPECT_TRUE(admits(number, DType::kF32, computed));
    }
  }
}

TEST(ReferenceNumbers, ASumThatMayOverflowOnTheWayBoundsNothing) {
  const std::vector<double> matrix{2.0, -2.0, 1.0};
  const std::vector<double> large{3e38, 3e38, 1.0};
  const std::vector<double> huge{3e38, -3e38, 1.0};
  const Bounded cancels = dot(matrix, 0, large, {}, {});
  EXPECT_TRUE(cancels.may_overflow());
  EXPECT_FALSE(cancels.overflows());
  EXPECT_TRUE(dot(matrix, 0, huge, {}, {}).overflows());
  const std::vector<double> fine{1.0, 2.0, 3.0};
  EXPECT_FALSE(dot(matrix, 0, fine, {}, {}).may_overflow());
}

TEST(ReferenceNumbers, WhatMayBeRoundedIsEitherTheNumberOrItsRounding) {
  const Bounded number{1.0 + 0x1p-9, 0x1p-30};  // bf16 rounds it down to 1
  const Bounded either = perhaps_converted(DType::kBF16, number);
  EXPECT_EQ(either.low(), 1.0);
  EXPECT_NEAR(either.high(), number.high(), 0x1p-50);
  EXPECT_EQ(perhaps_converted(DType::kF32, number).error, number.error);
  const Bounded large = perhaps_converted(DType::kF16, {70000, 0});
  EXPECT_TRUE(large.may_overflow());
  EXPECT_FALSE(large.overflows());
}

TEST(ReferenceNumbers, AWeightThatMayBeRoundedIsWithinTheBoundAsItWas) {
  const ExpertConfig config{.num_experts = 1,
                            .hidden = 1,
                            .inner = 1,
                            .gated = false,
                            .activation = Activation::kRelu,
                            .bias = true};
  for (const DType compute : {DType::kBF16, DType::kF16}) {
    // Just past the middle of two numbers: the rounding is off by nearly half their distance.
    const double half = compute == DType::kBF16 ? 0x1p-8 : 0x1p-11;
    for (const double weight : {1 + half * 1.01, 1 + half * 0.99}) {
      ExpertMatrices matrices;
      // The intermediate is its bias, which nothing rounds.
      matrices.gate = {0};
      matrices.gate_bias = {1};
      matrices.down_bias = {0};
      matrices.down = {round_value(compute, weight)};
      const std::vector<double> x = {1};
      const Bounded y =
          expert_row(config, matrices, x, {.compute = compute, .may_scale_sums = true}).front();
      EXPECT_LE(std::abs(weight - y.value), y.error);
      EXPECT_LE(y.error, 1.1 * half * 1.01);
    }
  }
}

/// The product of two numbers whose lower 13 bits are set, by three of its four parts.
TEST(ReferenceNumbers, AProductThatMayBeSplitIsWithinTheBoundAsItsParts) {
  const ExpertConfig config{.num_experts = 1,
                            .hidden = 1,
                            .inner = 1,
                            .gated = false,
                            .activation = Activation::kIdentity};
  const double x = 2 - 0x1p-23;  // its rest is all ones, and its upper bits are 2 - 2^-10
  const double upper = 2 - 0x1p-10;
  const double rest = std::ldexp(std::trunc(std::ldexp(x - upper, 21)), -21);  // 11 bits of it
  const double product = upper * upper + 2 * upper * rest;
  ExpertMatrices matrices;
  matrices.gate = {x};
  matrices.down = {1};
  const std::vector<double> tokens = {x};
  const auto row = [&](bool split) {
    return expert_row(config, matrices, tokens, {.may_split_products = split}).front();
  };
  EXPECT_GT(std::abs(product - row(false).value), row(false).error);
  EXPECT_LE(std::abs(product - row(true).value), row(true).error);
  EXPECT_EQ(
      expert_row(config, matrices, tokens, {.compute = DType::kBF16, .may_split_products = true})
          .front()
          .error,
      expert_row(config, matrices, tokens, {.compute = DType::kBF16}).front().error);
}

}  // namespace
}  // namespace switchyard::reference
