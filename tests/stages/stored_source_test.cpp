// Codes and scales in plain arrays as a source of experts, against the made-up source that they are
// copied from, whose numbers are the formats' definitions.
#include <gtest/gtest.h>

#include <tuple>

#include "testkit/expect_error.hpp"
#include "testkit/quantised_source.hpp"

namespace switchyard::test {
namespace {

constexpr ExpertPart kParts[] = {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown};

ExpertConfig config_of(std::int64_t hidden, std::int64_t inner, bool gated) {
  return {.num_experts = 3, .hidden = hidden, .inner = inner, .gated = gated, .bias = true};
}

std::int64_t rows_of(const ExpertConfig& config, ExpertPart part) {
  return part == ExpertPart::kDown ? config.hidden : config.inner;
}

/// The arrays of StoredExperts, copied from a source expert by expert.
struct Arrays {
  std::vector<std::byte> w13{}, scales13{}, w2{}, scales2{};
  std::vector<float> b13{}, b2{};
  WeightFormat format;

  Arrays(const ExpertConfig& config, const QuantisedSource& from) : format(from.stored_format()) {
    for (std::int32_t expert = 0; expert < config.num_experts; ++expert) {
      for (const ExpertPart part : kParts) {
        if (part == ExpertPart::kUp && !config.gated) continue;
        const bool down = part == ExpertPart::kDown;
        const std::int64_t rows = rows_of(config, part);
        const StoredLayout layout{
            .format = format, .rows = rows, .cols = down ? config.inner : config.hidden};
        std::vector<std::byte>& values = down ? w2 : w13;
        std::vector<std::byte>& scales = down ? scales2 : scales13;
        std::vector<float>& bias = down ? b2 : b13;
        values.resize(values.size() + static_cast<std::size_t>(layout.value_bytes()));
        scales.resize(scales.size() + static_cast<std::size_t>(layout.scale_bytes()));
        bias.resize(bias.size() + static_cast<std::size_t>(rows));
        from.read_stored(expert, part, 0, rows,
                         {values.data() + values.size() - layout.value_bytes(),
                          scales.data() + scales.size() - layout.scale_bytes()});
        from.read_bias(expert, part, bias.data() + bias.size() - rows);
      }
    }
  }
  [[nodiscard]] StoredExperts stored() const {
    return {.format = format,
            .w13 = w13.data(),
            .scales13 = scales13.data(),
            .w2 = w2.data(),
            .scales2 = scales2.data(),
            .b13 = b13.data(),
            .b2 = b2.data()};
  }
};

/// Rows as they are stored: values, then scales.
std::vector<std::byte> stored_rows(const ExpertSource& source, const ExpertConfig& config,
                                   std::int32_t expert, ExpertPart part, std::int64_t first,
                                   std::int64_t num) {
  const StoredLayout layout{.format = source.stored_format(),
                            .rows = num,
                            .cols = part == ExpertPart::kDown ? config.inner : config.hidden};
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(layout.value_bytes() + layout.scale_bytes()));
  source.read_stored(expert, part, first, num, {bytes.data(), bytes.data() + layout.value_bytes()});
  return bytes;
}

void expect_same(const ExpertConfig& config, const ExpertSource& have, const ExpertSource& want) {
  EXPECT_EQ(have.dtype(), DType::kBF16);
  EXPECT_EQ(have.stored_format(), want.stored_format());
  for (std::int32_t expert = 0; expert < config.num_experts; ++expert) {
    for (const ExpertPart part : kParts) {
      if (part == ExpertPart::kUp && !config.gated) continue;
      const std::int64_t rows = rows_of(config, part), cols = config.hidden + config.inner;
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const std::int64_t first : {std::int64_t{0}, rows - 1, rows / 2}) {
          std::vector<std::byte> a(static_cast<std::size_t>((rows - first) * cols * 4)), b(a);
          have.read(expert, part, first, rows - first, dtype, a.data());
          want.read(expert, part, first, rows - first, dtype, b.data());
          EXPECT_EQ(a, b) << expert << " " << to_string(dtype) << " from row " << first;
        }
      }
      for (std::int64_t first = 0; first < rows; first += kE4M3Block) {
        EXPECT_EQ(stored_rows(have, config, expert, part, first, rows - first),
                  stored_rows(want, config, expert, part, first, rows - first));
      }
      const std::int64_t last = rows - 1;
      EXPECT_EQ(stored_rows(have, config, expert, part, last, 1),
                stored_rows(want, config, expert, part, last, 1));
      std::vector<float> a(static_cast<std::size_t>(rows)), b(a);
      have.read_bias(expert, part, a.data());
      want.read_bias(expert, part, b.data());
      EXPECT_EQ(a, b);
    }
  }
}

TEST(StoredSource, GivesTheNumbersCodesAndScalesOfItsArrays) {
  for (const bool gated : {true, false}) {
    for (const auto& [format, hidden, inner] :
         {std::tuple{WeightFormat::kE4M3, 1, 1}, std::tuple{WeightFormat::kE4M3, 37, 130},
          std::tuple{WeightFormat::kE4M3, 260, 256}, std::tuple{WeightFormat::kMxfp4, 32, 32},
          std::tuple{WeightFormat::kMxfp4, 96, 160}}) {
      SCOPED_TRACE(testing::Message() << to_string(format) << " " << hidden << " x " << inner);
      const ExpertConfig config = config_of(hidden, inner, gated);
      const QuantisedSource want(config, format, 7);
      const Arrays arrays(config, want);
      expect_same(config, *make_stored_source(config, arrays.stored()), want);
    }
  }
}

TEST(StoredSource, WhatStoredWeightsCannotHaveIsNamedByItsPlace) {
  const ExpertConfig config = config_of(160, 130, true);
  const QuantisedSource made(config, WeightFormat::kE4M3, 3);
  std::vector<std::byte> out(1 << 20);
  const auto expect_refused = [&](const Arrays& arrays, const std::string& words, ExpertPart part) {
    const auto source = make_stored_source(config, arrays.stored());
    expect_error(ErrorCode::kInvalidArgument, words, [&] {
      source->read_stored(2, part, 128, 2, {out.data(), out.data() + (1 << 19)});
    });
  };
  Arrays arrays(config, made);
  // Expert 2's up: after the gate and up of two experts, and its own gate.
  arrays.w13[static_cast<std::size_t>((5 * 130 + 129) * 160 + 11)] = std::byte{0xff};
  expect_refused(arrays, "w13 of expert 2: row 129 of up, column 11 is NaN", ExpertPart::kUp);
  arrays = Arrays(config, made);
  const float infinite = HUGE_VALF;
  std::memcpy(arrays.scales2.data() + ((2 * 2 + 1) * 2 + 1) * 4, &infinite, 4);
  expect_refused(arrays, "w2's scales of expert 2: row 1 of down, column 1 is inf",
                 ExpertPart::kDown);
  const ExpertConfig mxfp4 = config_of(64, 32, true);
  Arrays of_mxfp4(mxfp4, QuantisedSource(mxfp4, WeightFormat::kMxfp4, 3));
  of_mxfp4.scales13[static_cast<std::size_t>((3 * 32 + 30) * 2 + 1)] = std::byte{0xff};
  const auto source = make_stored_source(mxfp4, of_mxfp4.stored());
  expect_error(
      ErrorCode::kInvalidArgument, "w13's scales of expert 1: row 30 of up, column 1 is 255, NaN",
      [&] {
        source->read_stored(1, ExpertPart::kUp, 0, 32, {out.data(), out.data() + (1 << 19)});
      });
}

TEST(StoredSource, RefusesByNameWhatItDoesNotTake) {
  const ExpertConfig config = config_of(160, 130, true);
  const Arrays arrays(config, QuantisedSource(config, WeightFormat::kE4M3, 3));
  std::vector<std::byte> out(1 << 20);
  expect_error(ErrorCode::kInvalidArgument, "rows from 5, 125 of them", [&] {
    make_stored_source(config, arrays.stored())
        ->read_stored(0, ExpertPart::kGate, 5, 125, {out.data(), out.data() + (1 << 19)});
  });
  StoredExperts stored = arrays.stored();
  stored.format = WeightFormat::kInt4;
  expect_error(ErrorCode::kUnsupported, "stored as int4",
               [&] { static_cast<void>(make_stored_source(config, stored)); });
  stored.format = WeightFormat::kMxfp4;
  expect_error(ErrorCode::kInvalidArgument, "inner=130",
               [&] { static_cast<void>(make_stored_source(config, stored)); });
  stored = arrays.stored();
  stored.scales2 = nullptr;
  expect_error(ErrorCode::kInvalidArgument, "scales of experts are null",
               [&] { static_cast<void>(make_stored_source(config, stored)); });
}

}  // namespace
}  // namespace switchyard::test
