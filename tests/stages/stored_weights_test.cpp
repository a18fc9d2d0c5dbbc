// Weights that are computed with as they are stored: codes against numbers that numpy has computed
// (tests/data/stored_golden.py), outputs against those of exact weights, bit for bit, and against
// the reference in double.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "experts/cpu/weights/weights.hpp"
#include "reference/expert.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/experts_support.hpp"
#include "testkit/quantised_source.hpp"

namespace switchyard::test {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kE4M3, WeightFormat::kMxfp4};

const nlohmann::json& golden(WeightFormat format) {
  static const nlohmann::json document = [] {
    std::ifstream file(SWITCHYARD_TEST_DATA "/stored_golden.json");
    return nlohmann::json::parse(file);
  }();
  return document.at(to_string(format));
}

using Bytes = std::vector<std::byte>;

/// A panel whose rows are golden blocks, each row of a half beginning elsewhere in them. e4m3: a
/// scale for each half and 128 of the depth; MXFP4: one for each row and 32, and no more than two
/// neighbours of the list in a group, so that there are groups on either side of every border.
struct GoldenPanel {
  const cpu::Kernels& kernels;
  const nlohmann::json& blocks;
  bool e4m3;
  std::int64_t depth;
  std::int64_t turn;  ///< Which blocks.

  [[nodiscard]] const nlohmann::json& block(std::int64_t col, std::int64_t k) const {
    const std::int64_t half = col / (kernels.panel_cols / 2);
    const std::int64_t number = e4m3 ? 2 * (k / 128) + half : k / 32 + col % 2;
    return blocks[static_cast<std::size_t>((number + turn) % std::ssize(blocks))];
  }
  [[nodiscard]] static std::size_t place(const nlohmann::json& block, std::int64_t col,
                                         std::int64_t k) {
    return static_cast<std::size_t>((k + 7 * col) % std::ssize(block.at("codes")));
  }
  [[nodiscard]] std::uint32_t bits(std::int64_t col, std::int64_t k, DType dtype) const {
    const nlohmann::json& b = block(col, k);
    return b.at(to_string(dtype))[place(b, col, k)].get<std::uint32_t>();
  }
  [[nodiscard]] StoredLayout layout() const {
    return {.format = e4m3 ? WeightFormat::kE4M3 : WeightFormat::kMxfp4,
            .rows = kernels.panel_cols / 2,
            .cols = depth};
  }

  /// Codes and scales of a half, and 0xff behind each: NaN in both formats.
  [[nodiscard]] std::pair<Bytes, Bytes> rows(int half) const {
    const StoredLayout shape = layout();
    Bytes values(static_cast<std::size_t>(shape.value_bytes()) + 64, std::byte{0xff});
    Bytes scales(static_cast<std::size_t>(shape.scale_bytes()) + 64, std::byte{0xff});
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      const std::int64_t col = half * shape.rows + row;
      for (std::int64_t k = 0; k < depth; ++k) {
        const nlohmann::json& b = block(col, k);
        const auto code = b.at("codes")[place(b, col, k)].get<std::uint8_t>();
        const auto at = static_cast<std::size_t>(row * depth + k);
        if (e4m3) {
          values[at] = std::byte{code};
          const auto scale = b.at("scale").get<std::uint32_t>();
          std::memcpy(scales.data() + k / 128 * 4, &scale, sizeof scale);
        } else {
          std::byte& pair = values[at / 2];
          pair =
              k % 2 == 0 ? std::byte{code} : pair | std::byte{static_cast<std::uint8_t>(code << 4)};
          scales[at / 32] = std::byte{b.at("scale").get<std::uint8_t>()};
        }
      }
    }
    return {values, scales};
  }

  /// Exactly as long as a panel is: what reads on finds the end of an allocation.
  [[nodiscard]] Bytes pack() const {
    const auto first = rows(0);
    const auto second = rows(1);
    const cpu::PanelShape shape = cpu::panel_shape(kernels, depth, kernels.panel_cols);
    Bytes panel(static_cast<std::size_t>(shape.panel_bytes), std::byte{0xff});
    cpu::pack_stored({.rows = {{first.first.data(), first.second.data()},
                               {second.first.data(), second.second.data()}},
                      .count = {kernels.panel_cols / 2, kernels.panel_cols / 2},
                      .depth = depth,
                      .shape = shape,
                      .kernels = &kernels,
                      .out = panel.data()});
    return panel;
  }
};

/// The bits of a number in a panel of exact weights.
std::uint32_t bits_in(const Bytes& tile, DType dtype, std::int64_t cols, std::int64_t k,
                      std::int64_t col) {
  const std::int64_t at = dtype == DType::kBF16 ? (k / 2 * cols + col) * 2 + k % 2 : k * cols + col;
  std::uint32_t bits = 0;
  std::memcpy(&bits, tile.data() + at * size_of(dtype), static_cast<std::size_t>(size_of(dtype)));
  return bits;
}

class StoredWeights : public Experts {};

TEST_P(StoredWeights, CodesWidenToTheBitsOfNumpy) {
  for (const WeightFormat format : kFormats) {
    for (const DType dtype : kTypes) {
      const cpu::Kernels& kernels = cpu::find_kernels(GetParam(), dtype, format);
      ASSERT_NE(kernels.widen, nullptr);
      for (std::int64_t turn = 0; turn < std::ssize(golden(format)); ++turn) {
        const GoldenPanel panel{kernels, golden(format), format == WeightFormat::kE4M3, 288, turn};
        const Bytes packed = panel.pack();
        for (const std::int64_t piece : {std::int64_t{288}, std::int64_t{96}, std::int64_t{32}}) {
          for (std::int64_t first = 0; first < panel.depth; first += piece) {
            Bytes tile(static_cast<std::size_t>(piece * kernels.panel_cols * size_of(dtype)));
            kernels.widen(
                {.panel = packed.data(), .first = first, .depth = piece, .out = tile.data()});
            for (std::int64_t k = 0; k < piece; ++k) {
              for (std::int64_t col = 0; col < kernels.panel_cols; ++col) {
                std::uint32_t got = bits_in(tile, dtype, kernels.panel_cols, k, col);
                std::uint32_t want = panel.bits(col, first + k, dtype);
                const std::uint32_t sign = dtype == DType::kF32 ? 0x80000000U : 0x8000U;
                if (want == sign && got == 0) want = 0;  // of -0 sums are those of 0
                ASSERT_EQ(got, want) << to_string(format) << " " << to_string(dtype) << " depth "
                                     << first + k << " column " << col << " turn " << turn;
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(StoredWeights, ReadBackAreTheBitsOfNumpyWithTheirSigns) {
  for (const WeightFormat format : kFormats) {
    const cpu::Kernels& kernels = cpu::find_kernels(GetParam(), DType::kF32, format);
    const GoldenPanel panel{kernels, golden(format), format == WeightFormat::kE4M3, 256, 3};
    const Bytes packed = panel.pack();
    for (std::int64_t col = 0; col < kernels.panel_cols; ++col) {
      std::vector<float> row(static_cast<std::size_t>(panel.depth));
      cpu::unpack_stored(kernels, packed.data(), col, panel.depth, row.data());
      for (std::int64_t k = 0; k < panel.depth; ++k) {
        const float value = row[static_cast<std::size_t>(k)];
        ASSERT_EQ(std::bit_cast<std::uint32_t>(value), panel.bits(col, k, DType::kF32))
            << to_string(format) << " depth " << k << " column " << col;
      }
    }
  }
}

/// The same experts twice.
struct Both {
  std::unique_ptr<ExpertWeights> stored, exact;
  Both(const ExpertConfig& config, const ExpertSource& source, DType dtype,
       ThreadPool* pool = nullptr) {
    LoadExpertsArgs args{.config = config,
                         .source = &source,
                         .dtype = dtype,
                         .num_local = config.num_experts,
                         .format = WeightFormat::kStored,
                         .execution = {.pool = pool}};
    stored = load_experts(args);
    args.format = WeightFormat::kExact;
    exact = load_experts(args);
  }
};

/// A problem of these sizes; only its tokens and assignments count.
Problem tokens_of(const ExpertConfig& config, DType dtype, std::int64_t tokens, unsigned seed) {
  const ExpertConfig few{.num_experts = config.num_experts, .hidden = 1, .inner = 1};
  Problem p = make_problem(few, dtype, tokens, 2, seed);
  p.made.config = config;
  p.x = random_floats(tokens * config.hidden, seed);
  for (float& value : p.x) value = round_to(dtype, value);
  return p;
}

struct Sizes {
  std::int64_t hidden, inner;
};
/// Blocks cut off, widths that are no multiple of a panel, one block, and one of gpt-oss's rows.
std::vector<Sizes> sizes_of(WeightFormat format) {
  if (format == WeightFormat::kMxfp4) return {{32, 32}, {96, 160}, {64, 2880}};
  return {{1, 1}, {37, 130}, {129, 37}, {200, 136}, {384, 260}};
}

TEST_P(StoredWeights, GiveTheBitsOfExactOnes) {
  for (const WeightFormat format : kFormats) {
    for (const Sizes& size : sizes_of(format)) {
      for (const bool gated : {true, false}) {
        const ExpertConfig config{
            .num_experts = 3,
            .hidden = size.hidden,
            .inner = size.inner,
            .gated = gated,
            .activation = gated ? Activation::kClampedSwiglu : Activation::kGelu,
            .limit = 1.5F,
            .bias = gated};
        const QuantisedSource source(config, format, 11);
        for (const DType dtype : kTypes) {
          const Both weights(config, source, dtype);
          EXPECT_EQ(weights.stored->format(), format);
          for (const std::int64_t tokens : {1, 4, 9, 40}) {
            const Problem p = tokens_of(config, dtype, tokens, 5);
            SCOPED_TRACE(testing::Message()
                         << to_string(format) << " " << to_string(dtype) << " " << size.hidden
                         << " x " << size.inner << " gated " << gated << " tokens " << tokens);
            const Layout& layout = kLayouts[tokens % 3];
            const auto got = run_rows(p, *weights.stored, layout);
            const auto want = run_rows(p, *weights.exact, layout);
            ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0);
          }
        }
      }
    }
  }
}

TEST_P(StoredWeights, GiveSumsOfTheSameBitsForAnyThreads) {
  ThreadPool pool(3);
  for (const WeightFormat format : kFormats) {
    const ExpertConfig config{.num_experts = 8, .hidden = 256, .inner = 352};
    const QuantisedSource source(config, format, 12);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Both weights(config, source, dtype, &pool);
      for (const std::int64_t tokens : {1, 60}) {
        const Problem p = tokens_of(config, dtype, tokens, 6);
        const Subtree tree{.order = {.num_experts = 8}, .num_groups = 8};
        const auto want = run_reduced(p, *weights.exact, kLayouts[0], tree);
        for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
          const auto got = run_reduced(p, *weights.stored, kLayouts[0], tree, false, threads);
          ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
              << to_string(format) << " " << to_string(dtype) << " " << tokens;
        }
      }
    }
  }
}

TEST_P(StoredWeights, AgreeWithTheReferenceOnTheNumbersThatTheyMean) {
  for (const WeightFormat format : kFormats) {
    const ExpertConfig config{.num_experts = 2,
                              .hidden = format == WeightFormat::kE4M3 ? 150 : 160,
                              .inner = format == WeightFormat::kE4M3 ? 131 : 96,
                              .activation = Activation::kClampedSwiglu,
                              .bias = true};
    const QuantisedSource source(config, format, 13);
    for (const DType dtype : kTypes) {
      const Both weights(config, source, dtype);
      const Problem p = tokens_of(config, dtype, 5, 7);
      const auto rows = run_rows(p, *weights.stored, kLayouts[0]);
      const reference::Precision precision{.compute = dtype};
      std::size_t i = 0;
      for (const Assignment& a : p.assignments) {
        const auto matrices = reference::read_expert(config, source, a.expert, precision);
        const std::vector<double> x(p.x.begin() + a.token * config.hidden,
                                    p.x.begin() + (a.token + 1) * config.hidden);
        for (const auto& want : reference::expert_row(config, matrices, x, precision)) {
          ASSERT_TRUE(reference::admits(want, DType::kF32, double{rows[i]}))
              << to_string(format) << " " << to_string(dtype) << " element " << i << " is "
              << rows[i] << ", want " << want.value << " +- " << want.error;
          ++i;
        }
      }
    }
  }
}

TEST_P(StoredWeights, TakeTheBytesThatTheyAreStoredIn) {
  const std::pair<WeightFormat, Sizes> cases[] = {{WeightFormat::kMxfp4, {2880, 2880}},
                                                  {WeightFormat::kE4M3, {7168, 2048}},
                                                  {WeightFormat::kE4M3, {2048, 768}}};
  for (const auto& [format, size] : cases) {
    double stored = 0;
    for (const auto& [rows, cols] :
         {std::pair{2 * size.inner, size.hidden}, std::pair{size.hidden, size.inner}}) {
      const StoredLayout layout{.format = format, .rows = rows, .cols = cols};
      stored += static_cast<double>(layout.value_bytes() + layout.scale_bytes());
    }
    for (const DType dtype : kTypes) {
      const cpu::Kernels& kernels = cpu::find_kernels(GetParam(), dtype, format);
      const auto bytes =
          static_cast<double>(cpu::panel_shape(kernels, size.hidden, 2 * size.inner).bytes() +
                              cpu::panel_shape(kernels, size.inner, size.hidden).bytes());
      EXPECT_LE(bytes, 1.02 * stored) << to_string(format) << " " << size.hidden;
      EXPECT_GE(bytes, stored);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, StoredWeights, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

TEST(StoredWeightsAlone, AreRefusedByNameWhereTheyAreNotNumbersOrNotThere) {
  const ExpertConfig config{.num_experts = 2, .hidden = 160, .inner = 96};
  const auto load = [&](const ExpertSource& source, WeightFormat format) {
    (void)load_experts({.config = config, .source = &source, .num_local = 2, .format = format});
  };
  QuantisedSource fp8(config, WeightFormat::kE4M3, 1);
  QuantisedSource fp4(config, WeightFormat::kMxfp4, 1);
  load(fp8, WeightFormat::kE4M3);
  load(fp4, WeightFormat::kMxfp4);
  expect_error(ErrorCode::kUnsupported, "mxfp4 weights of a source that stores e4m3 ones",
               [&] { load(fp8, WeightFormat::kMxfp4); });
  const Problem plain = make_problem(config, DType::kF32, 1, 1, 1);
  expect_error(ErrorCode::kUnsupported, "e4m3 weights of a source that stores exact ones",
               [&] { load(*plain.made.source(), WeightFormat::kE4M3); });
  fp8.part(ExpertPart::kDown).codes[161 * 96 + 5] = 0xff;
  expect_error(ErrorCode::kInvalidArgument, "a code of stored weights is not a number",
               [&] { load(fp8, WeightFormat::kStored); });
  fp8 = QuantisedSource(config, WeightFormat::kE4M3, 1);
  fp8.part(ExpertPart::kUp).block_scales[1] = std::numeric_limits<float>::infinity();
  expect_error(ErrorCode::kInvalidArgument, "a scale of stored weights is not a number",
               [&] { load(fp8, WeightFormat::kStored); });
  fp4.part(ExpertPart::kGate).scales[7] = 255;
  expect_error(ErrorCode::kInvalidArgument, "a scale of stored weights is not a number",
               [&] { load(fp4, WeightFormat::kStored); });
  ExpertConfig odd = config;
  odd.inner = 48;
  expect_error(ErrorCode::kInvalidArgument, "inner=48 to be multiples of 32", [&] {
    const QuantisedSource source(config, WeightFormat::kMxfp4, 1);
    (void)load_experts(
        {.config = odd, .source = &source, .num_local = 2, .format = WeightFormat::kStored});
  });
}

}  // namespace
}  // namespace switchyard::test
