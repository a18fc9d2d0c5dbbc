// Weights that a GPU uses as they are stored: streamed for few rows, decoded by the grouped
// products for more, made numbers for most, against the reference on the numbers that the codes
// mean; and random layers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/gpu/cuda_device.hpp"
#include "experts/implementations.hpp"
#include "switchyard/device.hpp"
#include "switchyard/experts.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/quantised_source.hpp"
#include "tests/cuda/random_layers.hpp"
#include "tests/cuda/stored/stored_problems.hpp"
#include "verify/verify.hpp"

namespace switchyard {
namespace {

using namespace test;
using Experts = StoredProblem;

class StoredOnTheDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
};

bool is_hopper() { return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }

/// Those that the device has for a format.
std::vector<const Implementation<ExpertsArgs>*> ways(WeightFormat format) {
  if (!is_hopper() || !is_multiplied(format)) return {&kExpertsCudaExpanded};
  return {&kExpertsCudaStreaming, &kExpertsCudaCoded, &kExpertsCudaExpanded};
}

void expect_right(const Problem& problem) {
  SCOPED_TRACE(std::string(to_string(problem.kind.format)) + ": " + problem.name);
  const Experts experts(problem);
  const std::vector<reference::Bounded> exact = experts.want();
  const bool splits = problem.kind.format == WeightFormat::kMxfp4;
  const std::vector<reference::Bounded> split =
      splits ? experts.want(true) : std::vector<reference::Bounded>{};
  for (const Implementation<ExpertsArgs>* way : ways(problem.kind.format)) {
    const bool sums = way == &kExpertsCudaStreaming;
    const auto& rows = splits && way == &kExpertsCudaCoded ? split : exact;
    EXPECT_EQ(reference::check_output(sums ? Experts::weighted(rows) : rows, problem.hidden,
                                      sums ? DType::kF32 : DType::kBF16, experts.run(*way)),
              "")
        << way->name;
  }
}

TEST_F(StoredOnTheDevice, SmallProblemsAreWithinTheirBounds) {
  for (const Kind& kind : kKinds) {
    for (const Problem& problem : problems(kind)) {
      if (problem.hidden * problem.inner <= 64 * 96) expect_right(problem);
    }
  }
}

TEST_F(StoredOnTheDevice, EveryProblemIsWithinItsBounds) {
  for (const Kind& kind : kKinds) {
    for (const Problem& problem : problems(kind)) {
      // Passes of many rows are about kernels that multiply codes, and the reference's time.
      const auto rows = std::accumulate(problem.rows.begin(), problem.rows.end(), std::int64_t{0});
      if (is_multiplied(kind.format) || rows * problem.hidden * problem.inner <= 16 << 20) {
        expect_right(problem);
      }
    }
  }
}

TEST_F(StoredOnTheDevice, LargerGroupsOfInt4AreWithinTheirBounds) {
  for (const std::int32_t group : {64, 128}) {
    const Kind kind{WeightFormat::kInt4, {.group = group, .zero_points = group == 64}};
    expect_right({.name = "larger groups",
                  .kind = kind,
                  .hidden = 384,
                  .inner = 640,
                  .rows = {7, 0, 150},
                  .bias = true});
  }
}

// 64 MiB of numbers are 13 of these experts: the others follow, with scales and biases of theirs.
TEST_F(StoredOnTheDevice, ExpertsThatFollowInMemoryAreWithinTheirBounds) {
  for (const Kind& kind : kKinds) {
    std::vector<std::int32_t> rows(16);
    rows[1] = 2;
    rows[13] = 3;
    rows[15] = 1;
    const Problem p{
        .name = "in turn", .kind = kind, .hidden = 5120, .inner = 160, .rows = rows, .bias = true};
    expect_right(p);
  }
}

// Numbers in memory are those that exact weights have: so are the results, whatever the tiles.
TEST_F(StoredOnTheDevice, NumbersInMemoryHaveTheBitsOfExactWeights) {
  const auto& exact_way = is_hopper() ? kExpertsCudaGroupedSm90 : kExpertsCudaGroupedSm80;
  for (const Kind& kind : kKinds) {
    const Problem p{
        .name = "bits", .kind = kind, .hidden = 512, .inner = 352, .rows = {3, 200, 1, 0, 70}};
    const Experts stored(p);
    const Experts exact(p, WeightFormat::kExact);
    EXPECT_EQ(stored.run(kExpertsCudaExpanded), exact.run(exact_way)) << to_string(kind.format);
  }
}

TEST_F(StoredOnTheDevice, BitsAreThoseOfTheRunBefore) {
  for (const Kind& kind : kKinds) {
    const Experts experts(
        {.name = "bits", .kind = kind, .hidden = 512, .inner = 320, .rows = {3, 20, 1, 0, 7}});
    for (const Implementation<ExpertsArgs>* way : ways(kind.format)) {
      const std::vector<float> first = experts.run(*way);
      for (int again = 0; again < 20; ++again) EXPECT_EQ(experts.run(*way), first) << way->name;
    }
  }
}

TEST_F(StoredOnTheDevice, BitsOfTheGroupedProductsDoNotDependOnOtherRows) {
  if (!is_hopper()) GTEST_SKIP() << "not sm_90";
  for (const Kind& kind : kKinds) {
    if (!is_multiplied(kind.format)) continue;
    // The first expert's rows alone in a product of 16, then among those of 32, 48 and 64, and of
    // two passes: the same first row.
    std::vector<float> first;
    for (const std::int32_t rows : {1, 17, 40, 64, 90}) {
      const Experts experts(
          {.name = "rows", .kind = kind, .hidden = 416, .inner = 352, .rows = {rows, 3}});
      std::vector<float> row = experts.run(kExpertsCudaCoded, true);
      row.resize(416);
      if (first.empty()) first = row;
      EXPECT_EQ(row, first) << rows << " rows";
    }
  }
}

TEST_F(StoredOnTheDevice, SmallRowsInTheOrderOfCodesHaveTheBitsOfRowsAsTheyLie) {
  if (!is_hopper()) GTEST_SKIP() << "not sm_90";
  for (const Kind& kind : kKinds) {
    if (kind.format != WeightFormat::kE4M3) continue;
    for (const Problem& problem : problems(kind)) {
      if (problem.hidden % 32 != 0 || problem.inner % 32 != 0 || problem.hidden > 2400) continue;
      const Experts experts(problem);
      const std::vector<float> want = experts.run_products(false);
      EXPECT_EQ(experts.run_products(true), want) << problem.name;
    }
  }
  const Experts odd({.name = "no multiples",
                     .kind = {WeightFormat::kE4M3},
                     .hidden = 200,
                     .inner = 136,
                     .rows = {2}});
  expect_error(ErrorCode::kInvalidArgument, "multiples of 32",
               [&] { static_cast<void>(odd.run_products(true)); });
}

// Of 128 products one alone is not zero: nothing is cut off where they are added, so the bounds of
// exact products hold for both, of which the second is given such rows too.
TEST_F(StoredOnTheDevice, SmallSplitRowsOfOneValueInABlockAreExact) {
  if (!is_hopper()) GTEST_SKIP() << "not sm_90";
  for (const Problem& wanted : problems({WeightFormat::kMxfp4})) {
    if (wanted.hidden > 2880) continue;
    Problem problem = wanted;
    problem.sparse = true;
    SCOPED_TRACE(problem.name);
    const Experts experts(problem);
    EXPECT_EQ(experts.check_act(), "");
    EXPECT_EQ(experts.check_down(), "");
  }
}

// The error of 14 bits is far below that of rows in bf16.
TEST_F(StoredOnTheDevice, SplitRowsAreAsNearAsNumbersInMemory) {
  if (!is_hopper()) GTEST_SKIP() << "not sm_90";
  const Experts experts({.name = "near",
                         .kind = {WeightFormat::kMxfp4},
                         .hidden = 2880,
                         .inner = 2880,
                         .rows = {5, 40, 130}});
  const std::vector<reference::Bounded> want = experts.want();
  const auto error = [&](const std::vector<float>& got) {
    double sum = 0;
    double size = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      sum += std::pow(double{got[i]} - want[i].value, 2);
      size += std::pow(want[i].value, 2);
    }
    return std::sqrt(sum / size);
  };
  const double numbers = error(experts.run(kExpertsCudaExpanded));
  for (const bool invariant : {false, true}) {
    EXPECT_LT(error(experts.run(kExpertsCudaCoded, invariant)), 1.1 * numbers);
  }
}

TEST_F(StoredOnTheDevice, ReadingGivesTheNumbersOfTheSource) {
  for (const Kind& kind : kKinds) {
    const Experts experts(
        {.name = "read", .kind = kind, .hidden = 160, .inner = 544, .rows = {1, 1}});
    for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
      const bool down = part == ExpertPart::kDown;
      const std::int64_t cols = down ? experts.weights().config().inner : 160;
      std::vector<float> got(static_cast<std::size_t>(19 * cols));
      std::vector<float> want(got.size());
      experts.weights().read(1, part, 13, 19, DType::kF32, got.data());
      experts.source().read(1, part, 13, 19, DType::kF32, want.data());
      EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0);
    }
  }
}

TEST_F(StoredOnTheDevice, TakesTheBytesOfTheFormat) {
  const double values = 3 * 320 * 576;
  for (const Kind& kind : kKinds) {
    const Experts experts(
        {.name = "bytes", .kind = kind, .hidden = 320, .inner = 576, .rows = {1}});
    const double bits = experts.weights().bytes_per_expert() * 8 / values;
    switch (kind.format) {
      case WeightFormat::kMxfp4: EXPECT_EQ(bits, 4.25); break;
      case WeightFormat::kE4M3: EXPECT_EQ(bits, 8); break;
      case WeightFormat::kInt4: EXPECT_EQ(bits, kind.int4.zero_points ? 4.625 : 4.5); break;
      default: EXPECT_EQ(bits, 4.5);
    }
  }
}

TEST_F(StoredOnTheDevice, RefusesWhatItDoesNotComputeWith) {
  const ExpertConfig config{.num_experts = 1, .hidden = 64, .inner = 64};
  const QuantisedSource source(config, WeightFormat::kE4M3, 1);
  const auto load = [&](const ExpertConfig& of, WeightFormat format, DType dtype) {
    (void)load_experts({.config = of,
                        .source = &source,
                        .dtype = dtype,
                        .num_local = 1,
                        .format = format,
                        .execution = {.backend = Backend::kCuda}});
  };
  expect_error(ErrorCode::kUnsupported, "e4m3 weights on cuda: they compute with bf16, not f16",
               [&] { load(config, WeightFormat::kStored, DType::kF16); });
  expect_error(ErrorCode::kUnsupported, "q8 weights on cuda",
               [&] { load(config, WeightFormat::kQ8, DType::kBF16); });
  expect_error(ErrorCode::kUnsupported, "hidden=60 and inner=64 want multiples of 8", [&] {
    load({.num_experts = 1, .hidden = 60, .inner = 64}, WeightFormat::kStored, DType::kBF16);
  });
}

constexpr WeightFormat kVerified[] = {WeightFormat::kMxfp4, WeightFormat::kE4M3,
                                      WeightFormat::kInt4, WeightFormat::kNvfp4};

TEST_F(StoredOnTheDevice, SmallNumberOfRandomLayersAgreesWithTheReference) {
  for (const WeightFormat format : kVerified) {
    test::expect_random_layers({.cases = 20, .seed = 5, .weights = format});
  }
}

TEST_F(StoredOnTheDevice, RandomLayersAgreeWithTheReference) {
  for (const WeightFormat format : kVerified) {
    test::expect_random_layers({.cases = 200, .seed = 6, .weights = format});
  }
}

}  // namespace
}  // namespace switchyard
