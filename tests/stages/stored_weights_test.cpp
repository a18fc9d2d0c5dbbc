// Weights that are computed with as they are stored: outputs against those of exact weights, bit
// for bit, and against the reference in double; what they take and what is refused.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "experts/cpu/weights/weights.hpp"
#include "reference/expert.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/experts_support.hpp"
#include "testkit/quantised_source.hpp"
#include "testkit/sanitized.hpp"
#include "testkit/stored_kinds.hpp"

namespace switchyard::test {
namespace {

class StoredWeights : public Experts {};

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
std::vector<Sizes> sizes_of(const StoredKind& kind) {
  switch (kind.format) {
    case WeightFormat::kE4M3: return {{1, 1}, {37, 130}, {129, 37}, {200, 136}, {384, 260}};
    case WeightFormat::kMxfp4: return {{32, 32}, {96, 160}, {64, 2880}};
    case WeightFormat::kNvfp4: return {{16, 16}, {48, 80}, {208, 720}};
    default: {
      const std::int64_t group = kind.group();
      return {{group, group}, {3 * group, 5 * group}};
    }
  }
}

TEST_P(StoredWeights, GiveTheBitsOfExactOnes) {
  for (const StoredKind& kind : stored_kinds()) {
    std::size_t turn = 0;
    for (const Sizes& size : sizes_of(kind)) {
      ++turn;
      for (const bool gated : {true, false}) {
        const ExpertConfig config{
            .num_experts = 3,
            .hidden = size.hidden,
            .inner = size.inner,
            .gated = gated,
            .activation = gated ? Activation::kClampedSwiglu : Activation::kGelu,
            .limit = 1.5F,
            .bias = gated};
        const QuantisedSource source(config, kind.format, 11, 1.0F, kind.int4);
        for (const DType dtype : kTypes) {
          // Each kind has each type with some size.
          if (kSanitized && dtype != kTypes[(turn + (gated ? 1 : 0)) % 3]) continue;
          const Both weights(config, source, dtype);
          EXPECT_EQ(weights.stored->format(), kind.format);
          for (const std::int64_t tokens : {1, 4, 9, 40}) {
            if (!gated && tokens != 9) continue;  // the same products
            const Problem p = tokens_of(config, dtype, tokens, 5);
            SCOPED_TRACE(testing::Message()
                         << kind.name() << " " << to_string(dtype) << " " << size.hidden << " x "
                         << size.inner << " gated " << gated << " tokens " << tokens);
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
  for (const StoredKind& kind : stored_kinds()) {
    const ExpertConfig config{.num_experts = 8, .hidden = 128, .inner = 256};
    const QuantisedSource source(config, kind.format, 12, 1.0F, kind.int4);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Both weights(config, source, dtype, &pool);
      for (const std::int64_t tokens : {1, 60}) {
        const Problem p = tokens_of(config, dtype, tokens, 6);
        const Subtree tree{.order = {.num_experts = 8}, .num_groups = 8};
        const auto want = run_reduced(p, *weights.exact, kLayouts[0], tree);
        for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
          const auto got = run_reduced(p, *weights.stored, kLayouts[0], tree, false, threads);
          ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
              << kind.name() << " " << to_string(dtype) << " " << tokens;
        }
      }
    }
  }
}

TEST_P(StoredWeights, AgreeWithTheReferenceOnTheNumbersThatTheyMean) {
  for (const StoredKind& kind : stored_kinds()) {
    const ExpertConfig config{.num_experts = 2,
                              .hidden = kind.format == WeightFormat::kE4M3 ? 150 : 256,
                              .inner = kind.format == WeightFormat::kE4M3 ? 131 : 128,
                              .activation = Activation::kClampedSwiglu,
                              .bias = true};
    const QuantisedSource source(config, kind.format, 13, 1.0F, kind.int4);
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
              << kind.name() << " " << to_string(dtype) << " element " << i << " is " << rows[i]
              << ", want " << want.value << " +- " << want.error;
          ++i;
        }
      }
    }
  }
}

TEST_P(StoredWeights, TakeTheBytesThatTheyAreStoredIn) {
  const auto sizes = [](const StoredKind& kind) -> std::vector<Sizes> {
    if (kind.format == WeightFormat::kE4M3) return {{7168, 2048}, {2048, 768}};
    if (kind.format == WeightFormat::kMxfp4) return {{2880, 2880}};
    return {{7168, 2048}, {2048, 768}};
  };
  for (const StoredKind& kind : stored_kinds()) {
    for (const Sizes& size : sizes(kind)) {
      double stored = 0;
      for (const auto& [rows, cols] :
           {std::pair{2 * size.inner, size.hidden}, std::pair{size.hidden, size.inner}}) {
        const StoredLayout layout{
            .format = kind.format, .rows = rows, .cols = cols, .int4 = kind.int4};
        stored += static_cast<double>(layout.value_bytes() + layout.scale_bytes());
      }
      for (const DType dtype : kTypes) {
        const cpu::Kernels& kernels = cpu::find_kernels(GetParam(), dtype, kind.format, kind.int4);
        const auto bytes =
            static_cast<double>(cpu::panel_shape(kernels, size.hidden, 2 * size.inner).bytes() +
                                cpu::panel_shape(kernels, size.inner, size.hidden).bytes());
        EXPECT_LE(bytes, 1.02 * stored) << kind.name() << " " << size.hidden;
        EXPECT_GE(bytes, stored);
      }
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
  QuantisedSource nvfp4(config, WeightFormat::kNvfp4, 1);
  nvfp4.part(ExpertPart::kUp).scales[11] = 0x7f;
  expect_error(ErrorCode::kInvalidArgument, "a scale of stored weights is not a number",
               [&] { load(nvfp4, WeightFormat::kNvfp4); });
  nvfp4 = QuantisedSource(config, WeightFormat::kNvfp4, 1);
  nvfp4.part(ExpertPart::kDown).factors[1] = std::numeric_limits<float>::infinity();
  expect_error(ErrorCode::kInvalidArgument, "the factor of the scales of stored weights",
               [&] { load(nvfp4, WeightFormat::kNvfp4); });
  const Int4Form form{.group = 32, .scale = DType::kBF16};
  QuantisedSource int4(config, WeightFormat::kInt4, 1, 1.0F, form);
  int4.part(ExpertPart::kGate).scales[3] = 0x7f;  // the high byte of the second scale
  int4.part(ExpertPart::kGate).scales[2] = 0x80;
  expect_error(ErrorCode::kInvalidArgument,
               "a scale of stored weights is not a number: row 0, "
               "column 32",
               [&] { load(int4, WeightFormat::kInt4); });
}

TEST(StoredWeightsAlone, AreRefusedByTheirSizesAndForms) {
  const auto load = [](const StoredKind& kind, const ExpertConfig& config) {
    const ExpertConfig whole{.num_experts = 2, .hidden = 128, .inner = 128};
    const QuantisedSource source(whole, kind.format, 1, 1.0F, kind.int4);
    (void)load_experts(
        {.config = config, .source = &source, .num_local = 2, .format = WeightFormat::kStored});
  };
  expect_error(ErrorCode::kInvalidArgument, "inner=48 to be multiples of 32", [&] {
    load({WeightFormat::kMxfp4}, {.num_experts = 2, .hidden = 128, .inner = 48});
  });
  expect_error(ErrorCode::kInvalidArgument, "nvfp4 weights want hidden=128 and inner=40", [&] {
    load({WeightFormat::kNvfp4}, {.num_experts = 2, .hidden = 128, .inner = 40});
  });
  expect_error(ErrorCode::kInvalidArgument, "hidden=96 and inner=128 to be multiples of 64", [&] {
    load({WeightFormat::kInt4, {.group = 64}}, {.num_experts = 2, .hidden = 96, .inner = 128});
  });
  expect_error(ErrorCode::kUnsupported, "a scale for 16 values each: want 32, 64 or 128",
               [] { check(Int4Form{.group = 16}); });
  expect_error(ErrorCode::kUnsupported, "scales of f32: want f16 or bf16",
               [] { check(Int4Form{.scale = DType::kF32}); });
}

}  // namespace
}  // namespace switchyard::test
