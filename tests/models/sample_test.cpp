// Drawing tokens, against probabilities that are made here from the definition.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "switchyard/error.hpp"
#include "switchyard/models/generate.hpp"

namespace switchyard::models {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const std::vector<float> kLogits = {0.5F, 2.0F, -1.0F, 2.0F, 1.0F, -3.0F};

/// What the definition gives, in double: sorted by hand below.
std::map<std::int32_t, double> wanted(const SampleConfig& config) {
  const std::vector<std::int32_t> order = {1, 3, 4, 0, 2, 5};
  std::map<std::int32_t, double> weight;
  double sum = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (config.top_k > 0 && static_cast<std::int64_t>(i) >= config.top_k) break;
    const double logit = static_cast<double>(kLogits[static_cast<std::size_t>(order[i])]);
    weight[order[i]] = std::exp(logit / config.temperature);
    sum += weight[order[i]];
  }
  std::map<std::int32_t, double> out;
  double reached = 0;
  double kept = 0;
  for (const std::int32_t id : order) {
    if (!weight.contains(id) || reached >= config.top_p - 1e-12) break;
    reached += weight[id] / sum;
    kept += weight[id];
    out[id] = weight[id];
  }
  for (auto& [id, w] : out) w /= kept;
  return out;
}

TEST(Sample, SharesAreThoseOfTheDefinition) {
  for (const SampleConfig& config :
       {SampleConfig{}, SampleConfig{.temperature = 0.5}, SampleConfig{.temperature = 3},
        SampleConfig{.top_k = 3}, SampleConfig{.top_k = 1}, SampleConfig{.top_p = 0.3},
        SampleConfig{.top_p = 0.85}, SampleConfig{.top_k = 100, .top_p = 0.95},
        SampleConfig{.temperature = 0.8, .top_k = 4, .top_p = 0.9}}) {
    const std::map<std::int32_t, double> shares = wanted(config);
    std::map<std::int32_t, int> times;
    constexpr int kDraws = 20000;
    for (int i = 0; i < kDraws; ++i) ++times[sample(kLogits, config, i % 7, i)];
    for (const auto& [id, n] : times) EXPECT_TRUE(shares.contains(id)) << id << " was drawn";
    for (const auto& [id, share] : shares) {
      const double deviation = std::sqrt(share * (1 - share) / kDraws);
      EXPECT_NEAR(times[id] / double(kDraws), share, 5 * deviation + 1e-9)
          << id << " at temperature " << config.temperature << ", top_k " << config.top_k
          << ", top_p " << config.top_p;
    }
  }
}

TEST(Sample, IsAFunctionOfSeedRowAndPosition) {
  const auto draws = [](std::uint64_t seed, std::int64_t row) {
    std::vector<std::int32_t> out;
    for (int i = 0; i < 64; ++i) out.push_back(sample(kLogits, {.seed = seed}, row, i));
    return out;
  };
  EXPECT_EQ(draws(1, 0), draws(1, 0));
  EXPECT_NE(draws(1, 0), draws(2, 0));
  EXPECT_NE(draws(1, 0), draws(1, 1));
}

TEST(Sample, TemperatureZeroTakesTheLargestAndOfEqualOnesTheLowest) {
  for (int i = 0; i < 8; ++i) EXPECT_EQ(sample(kLogits, {.temperature = 0}, i, i), 1);
  EXPECT_EQ(sample(kLogits, {.temperature = 1e-300}, 0, 0) % 2, 1);  // 1 or 3: both are largest
}

TEST(Sample, InfinitiesAreCertainOrImpossibleAndNanIsAnError) {
  const std::vector<float> logits = {-kInf, 1.0F, -kInf, kInf};
  for (int i = 0; i < 100; ++i) EXPECT_EQ(sample(logits, {}, 0, i), 3);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(sample(std::vector<float>{-kInf, 0.0F}, {}, 0, i), 1);
  const std::vector<float> bad = {0.0F, std::nanf("")};
  for (const double temperature : {0.0, 1.0}) {
    EXPECT_THROW((void)sample(bad, {.temperature = temperature}, 0, 0), Error);
  }
}

TEST(Sample, ValuesOutOfRangeAreRefused) {
  for (const SampleConfig& config :
       {SampleConfig{.temperature = -1}, SampleConfig{.temperature = HUGE_VAL},
        SampleConfig{.temperature = std::nan("")}, SampleConfig{.top_k = -1},
        SampleConfig{.top_p = 0}, SampleConfig{.top_p = 1.1},
        SampleConfig{.top_p = std::nan("")}}) {
    EXPECT_THROW((void)sample(kLogits, config, 0, 0), Error);
  }
}

}  // namespace
}  // namespace switchyard::models
