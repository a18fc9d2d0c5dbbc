// Work on rows against the plain loop with core/half.hpp, bit by bit, on whatever this machine has.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "core/row_ops.hpp"
#include "testkit/random_values.hpp"

namespace switchyard::test {
namespace {

using Bits = std::vector<std::uint16_t>;
using Floats = std::vector<float>;

// Whole vectors of every instruction set, parts of them, and nothing.
constexpr std::int64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 31, 33, 64, 100};

std::uint16_t plain_narrow(DType dtype, float value) {
  return dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
}
float plain_widen(DType dtype, std::uint16_t bits) {
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

/// Every pattern of the upper half of a float, with lower halves about the borders of rounding:
/// subnormal numbers, infinities and not-a-numbers among them.
Floats every_kind() {
  Floats out;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t lower : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      out.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
  }
  return out;
}

class RowOps : public testing::TestWithParam<DType> {};

TEST_P(RowOps, NarrowingRoundsEveryKindOfFloatAsThePlainLoop) {
  const Floats in = every_kind();
  Bits out(in.size());
  row_ops::narrow(GetParam(), in.data(), out.data(), std::ssize(in));
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (std::isnan(in[i])) {
      ASSERT_TRUE(std::isnan(plain_widen(GetParam(), out[i]))) << i;
    } else {
      ASSERT_EQ(out[i], plain_narrow(GetParam(), in[i])) << "of " << in[i];
    }
  }
}

TEST_P(RowOps, WideningIsExactForEveryPattern) {
  Bits in(0x10000);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint16_t>(i);
  Floats out(in.size());
  row_ops::widen(GetParam(), in.data(), out.data(), std::ssize(in));
  for (std::size_t i = 0; i < in.size(); ++i) {
    const float want = plain_widen(GetParam(), in[i]);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(out[i])) << i;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(want)) << i;
    }
  }
}

TEST_P(RowOps, NoLengthReachesBeyondItsEndAndNoPlaceIsWrong) {
  constexpr std::uint16_t kGuard = 0x1234;
  for (const std::int64_t size : kSizes) {
    for (const std::int64_t first : {0, 1, 3}) {  // places that no vector's alignment has
      const Floats in = random_floats(first + size, 3);
      Bits out(static_cast<std::size_t>(first + size + 1), kGuard);
      row_ops::narrow(GetParam(), in.data() + first, out.data() + first, size);
      for (std::int64_t i = 0; i < first + size + 1; ++i) {
        const bool inside = i >= first && i < first + size;
        const auto at = static_cast<std::size_t>(i);
        ASSERT_EQ(out[at], inside ? plain_narrow(GetParam(), in[at]) : kGuard) << size << ", " << i;
      }
      Floats back(out.size(), -1.0F);
      row_ops::widen(GetParam(), out.data() + first, back.data() + first, size);
      for (std::int64_t i = 0; i < first + size + 1; ++i) {
        const bool inside = i >= first && i < first + size;
        const auto at = static_cast<std::size_t>(i);
        ASSERT_EQ(back[at], inside ? plain_widen(GetParam(), out[at]) : -1.0F) << size;
      }
    }
  }
}

TEST_P(RowOps, SumsAreOneFmaANumber) {
  for (const std::int64_t size : kSizes) {
    const Floats row = random_floats(size, 4);
    Bits bits(row.size());
    row_ops::narrow(GetParam(), row.data(), bits.data(), size);
    Floats sums = random_floats(size, 5), want = sums;
    row_ops::accumulate(GetParam(), 0.3F, bits.data(), sums.data(), size);
    for (std::size_t i = 0; i < want.size(); ++i) {
      want[i] = std::fma(0.3F, plain_widen(GetParam(), bits[i]), want[i]);
    }
    EXPECT_EQ(sums, want) << size;
    Bits gradient = bits;
    row_ops::write_gradient(row.data(), GetParam(), gradient.data(), size, true);
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      ASSERT_EQ(gradient[i], plain_narrow(GetParam(), row[i] + plain_widen(GetParam(), bits[i])));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RowOps, testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& of) { return std::string(to_string(of.param)); });

}  // namespace
}  // namespace switchyard::test
