#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "core/human.hpp"
#include "core/printable.hpp"
#include "switchyard/error.hpp"

namespace switchyard {
namespace {

TEST(Printable, TextStaysAndWhatMovesACursorOrTurnsTheLineIsShownAsBytes) {
  for (const char* text : {"", "a b", "größe", "重み", "😀", "\\x1b", "/tmp/é.npy"}) {
    EXPECT_EQ(printable(text), text);
  }
  EXPECT_EQ(printable("\x1b[31m\r\n\t\x7f"), "\\x1b[31m\\x0d\\x0a\\x09\\x7f");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");           // C1: an escape of one character
  EXPECT_EQ(printable("\xe2\x80\xae"), "\\xe2\\x80\\xae");  // turns the direction of writing
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // longer than need be
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // half a pair
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond Unicode
  EXPECT_EQ(printable("\xe2\x82"), "\\xe2\\x82");
}

TEST(Printable, TheMiddleOfLongTextIsLeftOutBetweenCharacters) {
  const std::string x(100, 'x');
  EXPECT_EQ(printable(x, 100), x);
  EXPECT_EQ(printable(x + "y", 100),
            std::string(75, 'x') + "...[101 bytes in all]..." + std::string(24, 'x') + "y");
  std::string umlauts;
  for (int i = 0; i < 1000; ++i) umlauts += "ü";
  for (std::size_t most = 20; most < 30; ++most) {
    EXPECT_EQ(printable(umlauts, most).find("\\x"), std::string::npos) << most;
  }
  EXPECT_LT(printable(std::string(1 << 24, '\x80')).size(), 4000U);
}

TEST(Printable, AMessageOfTheLibraryIsOneShortLine) {
  const std::string what = Error(ErrorCode::kBadFile, std::string(1 << 20, '\x1b')).what();
  EXPECT_LT(what.size(), 4 * kPrintableLine + 100);
  EXPECT_EQ(what.find('\x1b'), std::string::npos);
  EXPECT_EQ(printable_message("'{}' of {}: {:.1f}", std::string("\x1b"), 3, 0.25),
            "'\\x1b' of 3: 0.2");
}

TEST(Human, CountsHaveThreeDigitsAndAUnit) {
  EXPECT_EQ(human_count(999, "B"), "999 B");
  EXPECT_EQ(human_count(1e3, "B"), "1 kB");
  EXPECT_EQ(human_count(6.75e15, "B"), "6.75 PB");
  EXPECT_EQ(human_count(2.7e19, "B"), "27 EB");
}

TEST(Half, EveryF16SurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = f16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(value))));
    } else {
      ASSERT_EQ(float_to_f16(value), bits) << value;
    }
  }
}

TEST(Half, EveryBf16SurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = bf16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(value))));
    } else {
      ASSERT_EQ(float_to_bf16(value), bits) << value;
    }
  }
}

TEST(Half, NarrowingRoundsHalfwayCasesToEvenAndOverflowsToInfinity) {
  for (std::uint32_t bits = 0; bits < 0x7bffU; ++bits) {
    const float low = f16_to_float(static_cast<std::uint16_t>(bits));
    const float high = f16_to_float(static_cast<std::uint16_t>(bits + 1));
    const float middle = 0.5F * (low + high);  // exact: one bit more than f16
    ASSERT_EQ(float_to_f16(middle), bits + (bits & 1U));
    ASSERT_EQ(float_to_f16(std::nextafter(middle, low)), bits);
    ASSERT_EQ(float_to_f16(std::nextafter(middle, high)), bits + 1);
  }
  EXPECT_EQ(float_to_f16(65519.996F), 0x7bffU);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7c00U);
  EXPECT_EQ(float_to_bf16(1.00390625F), 0x3f80U);  // halfway, even below
  EXPECT_EQ(float_to_bf16(1.01171875F), 0x3f82U);  // halfway, even above
}

}  // namespace
}  // namespace switchyard
