#include <gtest/gtest.h>

#include <cmath>

#include "core/half.hpp"
#include "reference/bounded.hpp"

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

}  // namespace
}  // namespace switchyard::reference
