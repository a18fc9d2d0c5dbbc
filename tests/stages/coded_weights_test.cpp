// Codes as a GPU's kernels read them: what they mean there is what they mean as they are stored.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "core/mxfp4.hpp"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/coded/pack.hpp"
#include "switchyard/error.hpp"
#include "testkit/quantised_source.hpp"

namespace switchyard {
namespace {

struct Stored {
  StoredLayout layout;
  std::vector<std::byte> values, scales;
  float factor = 1;

  Stored(WeightFormat format, std::int64_t rows, std::int64_t cols, const Int4Form& int4 = {})
      : layout{.format = format, .rows = rows, .cols = cols, .int4 = int4},
        values(static_cast<std::size_t>(layout.value_bytes())),
        scales(static_cast<std::size_t>(layout.scale_bytes())) {}
  [[nodiscard]] ConstStoredRows rows() const { return {values.data(), scales.data(), factor}; }
  [[nodiscard]] std::vector<float> numbers() const {
    std::vector<float> out(static_cast<std::size_t>(layout.rows * layout.cols));
    decode(layout, rows(), DType::kF32, out.data());
    return out;
  }
};

Stored random_mxfp4(std::int64_t rows, std::int64_t cols, int lowest, int highest) {
  Stored stored(WeightFormat::kMxfp4, rows, cols);
  std::mt19937 random(static_cast<unsigned>(rows * 1000 + cols));
  for (std::byte& two : stored.values) two = static_cast<std::byte>(random() & 255U);
  std::uniform_int_distribution<int> scale(lowest, highest);
  for (std::byte& one : stored.scales) one = static_cast<std::byte>(scale(random));
  return stored;
}

Stored random_e4m3(std::int64_t rows, std::int64_t cols) {
  Stored stored(WeightFormat::kE4M3, rows, cols);
  std::mt19937 random(static_cast<unsigned>(rows * 1000 + cols + 1));
  for (std::byte& code : stored.values) {
    code = static_cast<std::byte>(random() & 255U);
    if ((code & std::byte{0x7f}) == std::byte{0x7f}) code = std::byte{0x80};
  }
  std::uniform_real_distribution<float> scale(-3.0F, 3.0F);
  for (std::size_t i = 0; i < stored.scales.size(); i += sizeof(float)) {
    const float value = scale(random);
    std::memcpy(stored.scales.data() + i, &value, sizeof value);
  }
  return stored;
}

std::vector<std::byte> packed(const Stored& stored, float& factor) {
  std::vector<std::byte> out(static_cast<std::size_t>(coded::bytes_of(stored.layout)));
  factor = coded::pack(stored.layout, stored.rows(), out.data()).factor;
  return out;
}

std::vector<Int4Form> int4_forms() {
  std::vector<Int4Form> forms;
  for (const std::int32_t group : {32, 64, 128}) {
    for (const bool zero_points : {false, true}) {
      forms.push_back({.group = group, .scale = DType::kF16, .zero_points = zero_points});
      forms.push_back({.group = group, .scale = DType::kBF16, .zero_points = zero_points});
    }
  }
  return forms;
}

/// Of int4 or NVFP4, with scales of any bits but those of no number.
Stored random_nibbles(WeightFormat format, std::int64_t rows, std::int64_t cols,
                      const Int4Form& int4 = {}) {
  Stored stored(format, rows, cols, int4);
  std::mt19937 random(static_cast<unsigned>(rows * 1000 + cols + int4.group));
  for (auto* bytes : {&stored.values, &stored.scales}) {
    for (std::byte& one : *bytes) one = static_cast<std::byte>(random() & 255U);
  }
  // An exponent of all ones, in the upper byte of 16 bits, or NaN of e4m3.
  const auto no_number = static_cast<std::byte>(format == WeightFormat::kNvfp4 ? 0x7f
                                                : int4.scale == DType::kF16    ? 0x7c
                                                                               : 0x7f);
  for (std::byte& one : stored.scales) {
    if ((one & no_number) == no_number) one &= std::byte{0xbf};
  }
  if (format == WeightFormat::kNvfp4) stored.factor = 0.375F;
  return stored;
}

void expect_same_numbers(const Stored& stored) {
  const StoredLayout& layout = stored.layout;
  SCOPED_TRACE(std::string(to_string(layout.format)) + " " + std::to_string(layout.rows) + " x " +
               std::to_string(layout.cols));
  float factor = 0;
  const std::vector<std::byte> codes = packed(stored, factor);
  std::vector<float> scales(stored.scales.size() / sizeof(float));
  if (layout.format == WeightFormat::kE4M3) {
    std::memcpy(scales.data(), stored.scales.data(), stored.scales.size());
  }
  const std::vector<float> want = stored.numbers();
  // From every row on: the first row of a call lies anywhere in its group.
  for (std::int64_t first = 0; first < layout.rows; ++first) {
    const std::int64_t rows = std::min<std::int64_t>(9, layout.rows - first);
    std::vector<float> got(static_cast<std::size_t>(rows * layout.cols));
    coded::unpack(
        layout.format, layout.cols,
        codes.data() + first / coded::kGroupRows * coded::group_bytes(layout.format, layout.cols),
        factor, scales.data(), first, rows, got.data());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(
          std::bit_cast<std::uint32_t>(got[i]),
          std::bit_cast<std::uint32_t>(want[static_cast<std::size_t>(first * layout.cols) + i]))
          << "row " << first << " value " << i;
    }
  }
}

TEST(CodedWeights, NumbersAreThoseThatWereStored) {
  for (const std::int64_t rows : {8, 16, 136}) {
    for (const std::int64_t cols : {32, 64, 96, 160, 2880}) {
      expect_same_numbers(random_mxfp4(rows, cols, 100, 140));
      expect_same_numbers(random_e4m3(rows, cols));
    }
    for (const std::int64_t cols : {8, 40, 136, 264}) expect_same_numbers(random_e4m3(rows, cols));
  }
  // The ends of the scales: subnormal numbers and the largest.
  expect_same_numbers(random_mxfp4(8, 64, 0, 120));
  expect_same_numbers(random_mxfp4(8, 64, 134, 252));
}

void expect_as_stored(const Stored& stored) {
  const StoredLayout& layout = stored.layout;
  float factor = 0;
  const std::vector<std::byte> lies = packed(stored, factor);
  EXPECT_EQ(factor, stored.factor);
  const auto used = static_cast<std::size_t>(layout.value_bytes() + layout.scale_bytes());
  ASSERT_GE(lies.size(), used);
  EXPECT_LT(lies.size() - used, 16U);
  EXPECT_EQ(lies.size() % 16, 0U);
  EXPECT_EQ(std::memcmp(lies.data(), stored.values.data(), stored.values.size()), 0);
  EXPECT_EQ(
      std::memcmp(lies.data() + stored.values.size(), stored.scales.data(), stored.scales.size()),
      0);
  EXPECT_TRUE(std::all_of(lies.begin() + static_cast<std::ptrdiff_t>(used), lies.end(),
                          [](std::byte rest) { return rest == std::byte{0}; }));
}

// What kernels find without a table: each matrix begins at 16 bytes, its scales behind its values.
TEST(CodedWeights, Int4AndNvfp4LieAsTheyAreStored) {
  for (const std::int64_t rows : {16, 136}) {
    for (const Int4Form& form : int4_forms()) {
      for (const std::int64_t groups : {1, 3, 6}) {
        const Stored stored = random_nibbles(WeightFormat::kInt4, rows, groups * form.group, form);
        expect_as_stored(stored);
        EXPECT_EQ(coded::floats_of(stored.layout), 0);
      }
    }
    for (const std::int64_t cols : {16, 48, 2880}) {
      const Stored stored = random_nibbles(WeightFormat::kNvfp4, rows, cols);
      expect_as_stored(stored);
      EXPECT_EQ(coded::floats_of(stored.layout), 1);
    }
  }
}

// The bar of every format: at most 1.02 of what a file has, at the smallest sizes of a model.
TEST(CodedWeights, MatricesTakeTheBytesThatTheyAreStoredIn) {
  const auto share = [](const StoredLayout& layout) {
    const std::int64_t floats = coded::floats_of(layout);
    return static_cast<double>(coded::bytes_of(layout) + 4 * floats) /
           static_cast<double>(layout.value_bytes() + layout.scale_bytes());
  };
  for (const auto& [rows, cols] : {std::pair{768, 2048}, {2048, 768}, {2880, 2880}}) {
    for (const WeightFormat format :
         {WeightFormat::kE4M3, WeightFormat::kMxfp4, WeightFormat::kInt4, WeightFormat::kNvfp4}) {
      const StoredLayout layout{
          .format = format, .rows = rows, .cols = cols, .int4 = {.group = 32}};
      EXPECT_LE(share(layout), 1.02) << to_string(format) << " " << rows << " x " << cols;
    }
  }
}

TEST(CodedWeights, EveryByteOfAMatrixIsOneValuesOrOneScales) {
  for (const WeightFormat format : {WeightFormat::kMxfp4, WeightFormat::kE4M3}) {
    const std::int64_t rows = 24;
    const std::int64_t cols = 192;
    const std::int64_t bytes = format == WeightFormat::kMxfp4 ? 4 : 8;
    std::set<std::int64_t> taken;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t column = 0; column < cols; column += 8) {
        const std::int64_t at = coded::place_of(format, cols, row, column);
        EXPECT_EQ(at % bytes, 0);
        for (std::int64_t i = 0; i < bytes; ++i) EXPECT_TRUE(taken.insert(at + i).second);
      }
      for (std::int64_t column = 0; format == WeightFormat::kMxfp4 && column < cols; column += 32) {
        EXPECT_TRUE(taken.insert(coded::scale_place_of(cols, row, column)).second);
      }
    }
    EXPECT_EQ(std::ssize(taken), coded::matrix_bytes(format, rows, cols));
    EXPECT_EQ(*taken.begin(), 0);
    EXPECT_EQ(*taken.rbegin() + 1, coded::matrix_bytes(format, rows, cols));
  }
}

// The words that tensor cores are given: as a row of bf16 lies in memory, times a power of two.
TEST(CodedWeights, PairsAreNeighboursInMemoryOrder) {
  constexpr std::uint32_t kCodes = 0x7b3d1fa8;  // column 0 in the lowest four bits
  const std::uint32_t word = coded::mxfp4_word(kCodes);
  const std::uint32_t pairs[4] = {coded::mxfp4_pair<0>(word), coded::mxfp4_pair<1>(word),
                                  coded::mxfp4_pair<2>(word), coded::mxfp4_pair<3>(word)};
  for (std::size_t column = 0; column < 8; ++column) {
    const std::uint32_t half = pairs[column / 2] >> (16 * (column % 2)) & 0xffffU;
    EXPECT_EQ(std::bit_cast<float>(half << 16) * 0x1p126F, kE2M1[kCodes >> (4 * column) & 15U]);
  }
  static_assert((coded::kMxfp4LargestScale * coded::kMxfp4Exponents) == 0x7e807e80U);  // 2^126
}

TEST(CodedWeights, PairsOfE4M3AreTheirNumbersToo) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    if ((code & 0x7fU) == 0x7fU) continue;
    const std::uint32_t pair = coded::e4m3_pair(code << 24 | (code ^ 0x80U) << 8);
    const double want = value_of_e4m3(static_cast<std::uint8_t>(code));
    EXPECT_EQ(std::bit_cast<float>(pair & 0xffff0000U) * 0x1p120, want);
    EXPECT_EQ(std::bit_cast<float>(pair << 16) * 0x1p120, -want);
  }
}

// wgmma's matrices of 8 rows by 16 bytes, without a swizzle, side by side.
TEST(CodedWeights, RowsOfE4M3LieAsWgmmaTakesThem) {
  for (std::int64_t column = 0; column < 192; column += 8) {
    for (std::int64_t row = 0; row < 16; ++row) {
      EXPECT_EQ(coded::place_of(WeightFormat::kE4M3, 192, row, column),
                row / 8 * (192 * 8) + column / 16 * 128 + row % 8 * 16 + column % 16);
    }
  }
}

TEST(CodedWeights, RowsInTheOrderOfCodesLieByRunsAsLanesTakeThem) {
  // Lane t owns values 8t to 8t + 7 of a step. A product of 16 takes two runs of 8 values, of which
  // t has a pair in each: in order, or (lanes 2 and 3) the last four values first.
  std::set<std::int64_t> places;
  for (std::int64_t column = 0; column < 96; ++column) {
    const std::int64_t place = coded::ordered_column(column);
    EXPECT_EQ(place / 32, column / 32);
    EXPECT_EQ(place % 2, column % 2);
    const std::int64_t lane = column % 32 / 8;
    const std::int64_t pair = column % 8 / 2;
    EXPECT_EQ(place % 32 / 8, lane >= 2 ? (pair + 2) % 4 : pair) << column;
    EXPECT_EQ(place % 8 / 2, lane) << column;
    EXPECT_TRUE(places.insert(place).second);
  }
}

// The bytes of a split row are those that a lane's codes, chosen by the halves of its words, meet.
TEST(CodedWeights, SplitRowsLieAsLanesTakeThem) {
  for (const std::int64_t cols : {32, 64, 96, 128, 160, 224, 2880}) {
    std::set<std::int64_t> places;
    for (std::int64_t column = 0; column < cols; ++column) {
      const std::int64_t first = coded::split_byte(cols, column);
      const std::int64_t second = first + coded::to_second_byte(cols, column);
      EXPECT_TRUE(places.insert(first).second) << column;
      EXPECT_TRUE(places.insert(second).second) << column;
      // Lane t's word of a step begins 8t bytes into the unit's codes of row 0.
      const std::int64_t at = coded::place_of(WeightFormat::kMxfp4, cols, 0, column / 8 * 8);
      const std::int64_t in_unit = at % coded::kMxfp4UnitBytes;
      const std::int64_t step = column % 128 / 64 * 2 + in_unit % 8 / 4;
      const bool upper = coded::mxfp4_at(static_cast<int>(column % 8)) >= 16;
      const std::int64_t digit = coded::mxfp4_at(static_cast<int>(column % 8)) % 16 / 4;
      EXPECT_EQ(first - column / 128 * 256, step * 32 + (upper ? 16 : 0) + in_unit / 8 * 4 + digit)
          << column << " of " << cols;
    }
    EXPECT_EQ(*places.begin(), 0);
    EXPECT_EQ(*places.rbegin(), 2 * cols - 1);
  }
}

TEST(CodedWeights, TablesOfAScaleAreItsNumbersOfE5M2) {
  const auto value_of_e5m2 = [](std::uint32_t byte) {
    EXPECT_NE(byte >> 2 & 31U, 31U);
    return byte >> 2 == 0 ? std::ldexp(byte & 3U, -16)
                          : std::ldexp(4 + (byte & 3U), static_cast<int>(byte >> 2) - 17);
  };
  for (int below = 0; below <= coded::kMxfp4FoldedRange; ++below) {
    const auto scale = static_cast<std::uint32_t>(coded::kMxfp4LargestScale - below);
    for (std::uint32_t code = 0; code < 8; ++code) {
      const std::uint32_t table = code < 4 ? coded::mxfp4_lower(scale) : coded::mxfp4_upper(scale);
      EXPECT_EQ(value_of_e5m2(table >> (8 * (code % 4)) & 255U) * coded::kMxfp4Unfolded,
                std::ldexp(kE2M1[code], -below))
          << code << " of " << below;
    }
    // Where there are no weights codes are zeros, and so are scales.
    EXPECT_EQ(coded::mxfp4_lower(0) & 255U, 0U);
  }
}

TEST(CodedWeights, ScalesFoldWhereTheyAreNearEachOther) {
  const auto folds = [](const Stored& stored) {
    std::vector<std::byte> out(static_cast<std::size_t>(coded::bytes_of(stored.layout)));
    return coded::pack(stored.layout, stored.rows(), out.data()).folds;
  };
  Stored stored = random_mxfp4(8, 96, 120, 120);
  EXPECT_TRUE(folds(stored));
  stored.scales[7] = std::byte{120 - coded::kMxfp4FoldedRange};
  EXPECT_TRUE(folds(stored));
  stored.scales[7] = std::byte{120 - coded::kMxfp4FoldedRange - 1};
  EXPECT_FALSE(folds(stored));
  // Nor does it matter what zeros are times.
  std::fill_n(stored.values.begin() + 7 * 16, 16, std::byte{0x80});
  EXPECT_TRUE(folds(stored));
}

TEST(CodedWeights, LanesReadTheirWordsOfE4M3FromDifferentBanks) {
  for (const bool last : {false, true}) {
    std::set<int> banks;
    for (int lane = 0; lane < 32; ++lane) {
      const int t = lane % 4;
      const int word = last ? 4 - coded::e4m3_first_word(t) : coded::e4m3_first_word(t);
      // Two pairs of values a word: the rows have them in the runs that these products take.
      EXPECT_EQ(coded::ordered_run(t, word / 2), last ? 2 : 0) << lane;
      banks.insert((coded::e4m3_place(lane / 4, t) + word) / 4 % 32);
    }
    EXPECT_EQ(banks.size(), 32U);
  }
}

TEST(CodedWeights, BlocksOfZerosMayHaveAnyScale) {
  Stored stored = random_mxfp4(8, 64, 120, 125);
  for (std::size_t i = 0; i < 16; ++i) {
    stored.values[i] = i % 2 == 0 ? std::byte{0} : std::byte{0x88};
    stored.values[16 + i] = std::byte{0x80};
  }
  stored.scales[0] = std::byte{0};
  stored.scales[1] = std::byte{254};
  float factor = 0;
  (void)packed(stored, factor);
  EXPECT_LE(factor, 0.25F);
  expect_same_numbers(stored);
}

TEST(CodedWeights, RefusesWhatIsNoNumberAndScalesTooFarApart) {
  const auto refused = [](const Stored& stored, ErrorCode code, const char* words) {
    float factor = 0;
    try {
      (void)packed(stored, factor);
      ADD_FAILURE() << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  Stored stored = random_mxfp4(16, 96, 120, 125);
  stored.scales[10] = std::byte{0xff};
  refused(stored, ErrorCode::kInvalidArgument, "row 3, column 32");
  stored.scales[10] = std::byte{2};
  stored.scales[4] = std::byte{125};
  refused(stored, ErrorCode::kUnsupported, "2^-125 (row 3, column 32) to 2^-2");
  Stored codes = random_e4m3(16, 40);
  codes.values[85] = std::byte{0xff};
  refused(codes, ErrorCode::kInvalidArgument, "row 2, column 5");
  refused(Stored(WeightFormat::kExact, 8, 32), ErrorCode::kInvalidArgument, "exact");
  for (const DType type : {DType::kF16, DType::kBF16}) {
    const Int4Form form{.group = 32, .scale = type, .zero_points = true};
    Stored int4 = random_nibbles(WeightFormat::kInt4, 16, 96, form);
    // Three groups: 6 bytes of scales and 2 of zero points a row. Infinity in row 2, group 1.
    int4.scales[18] = std::byte{type == DType::kF16 ? std::uint8_t{0} : std::uint8_t{0x80}};
    int4.scales[19] = std::byte{type == DType::kF16 ? std::uint8_t{0x7c} : std::uint8_t{0x7f}};
    refused(int4, ErrorCode::kInvalidArgument,
            "a scale of stored weights is not a number: row 2, column 32");
  }
  Stored nvfp4 = random_nibbles(WeightFormat::kNvfp4, 16, 48);
  nvfp4.scales[11] = std::byte{0xff};
  refused(nvfp4, ErrorCode::kInvalidArgument,
          "a scale of stored weights is not a number: row 3, column 32");
  nvfp4 = random_nibbles(WeightFormat::kNvfp4, 16, 48);
  nvfp4.factor = std::numeric_limits<float>::infinity();
  refused(nvfp4, ErrorCode::kInvalidArgument, "the factor of the scales of stored weights");
}

}  // namespace
}  // namespace switchyard
