// Intervals, probabilities and powers against values of mpmath 1.3 at 30 digits: the incomplete
// beta function, and a Poisson mixture of them for the noncentral distribution.
#include "bench/measure/inference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "switchyard/error.hpp"

namespace switchyard::bench {
namespace {

TEST(Inference, StudentWithin) {
  const struct {
    int freedom;
    double t, within;
  } golden[] = {{1, 0.1, 0.063451034861107139}, {1, 12, 0.94707064788082025},
                {2, 1, 0.57735026918962576},    {2, 12, 0.99312706632284154},
                {3, 0.1, 0.073347651199194171}, {3, 2.5, 0.91229335299193445},
                {4, 1, 0.62609903369994111},    {4, 12, 0.99972357145149703},
                {5, 2.5, 0.94550990065762376},  {9, 12, 0.9999992300113777},
                {10, 2.5, 0.9685531557633912},  {31, 0.1, 0.079011754592040046},
                {31, 12, 0.99999999999965221}};
  for (const auto& [freedom, t, within] : golden) {
    EXPECT_NEAR(student_within(t, freedom), within, 2e-15) << freedom << " " << t;
  }
  EXPECT_EQ(student_within(0, 3), 0);
  EXPECT_NEAR(student_within(1e12, 2), 1, 1e-15);
  EXPECT_THROW(static_cast<void>(student_within(-1, 2)), Error);
  EXPECT_THROW(static_cast<void>(student_within(1, 0)), Error);
  EXPECT_THROW(static_cast<void>(student_within(NAN, 1)), Error);
}

TEST(Inference, StudentQuantile) {
  const struct {
    double p;
    int freedom;
    double t;
  } golden[] = {{0.9, 1, 3.0776835371752534},    {0.975, 1, 12.706204736174705},
                {0.999, 1, 318.30883898555045},  {0.975, 2, 4.3026527297494639},
                {0.999, 2, 22.327124770119875},  {0.975, 3, 3.1824463052837096},
                {0.975, 4, 2.7764451051977944},  {0.9, 5, 1.4758840488244811},
                {0.999, 5, 5.8934295313560101},  {0.975, 7, 2.3646242515927853},
                {0.975, 15, 2.1314495455597757}, {0.999, 40, 3.3068777140858225}};
  for (const auto& [p, freedom, t] : golden) {
    EXPECT_NEAR(student_quantile(p, freedom), t, 1e-11 * t) << freedom << " " << p;
  }
  EXPECT_NEAR(student_quantile(0.5, 7), 0, 1e-12);
  EXPECT_THROW(static_cast<void>(student_quantile(1, 7)), Error);
  EXPECT_THROW(static_cast<void>(student_quantile(0.2, 7)), Error);
}

TEST(Inference, WilsonsIntervalIsWhereTheScoreTestEnds) {
  const struct {
    int k, n;
    double low, high;
  } golden[] = {{8, 10, 0.49016247153670342, 0.94331784854562474},
                {0, 10, 0, 0.27753279986288925},
                {10, 10, 0.72246720013711075, 1},
                {50, 200, 0.19508168006817497, 0.31434098312045831}};
  for (const auto& [k, n, low, high] : golden) {
    const Interval found = wilson_interval(k, n);
    EXPECT_NEAR(found.low, low, 1e-12) << k << " " << n;
    EXPECT_NEAR(found.high, high, 1e-12) << k << " " << n;
  }
  for (const auto& [k, n] : {std::pair(-1, 3), std::pair(4, 3), std::pair(0, 0)}) {
    EXPECT_THROW(static_cast<void>(wilson_interval(k, n)), Error);
  }
}

TEST(Inference, APairedTest) {
  // By hand: mean 2, s = 1, n = 3, t = 3.4641; 1 - within(2 sqrt 3, 2) = 1 - sqrt(12 / 14).
  const PairedTest test = paired_test({1, 2, 3});
  EXPECT_EQ(test.n, 3);
  EXPECT_DOUBLE_EQ(test.mean, 2);
  EXPECT_DOUBLE_EQ(test.deviation, 1);
  EXPECT_NEAR(test.interval.low, 2 - 4.3026527297494639 / std::sqrt(3.0), 1e-12);
  EXPECT_NEAR(test.interval.high, 2 + 4.3026527297494639 / std::sqrt(3.0), 1e-12);
  EXPECT_NEAR(test.p.value(), 1 - std::sqrt(12.0 / 14), 1e-14);
  EXPECT_FALSE(paired_test({5}).p.has_value());
  EXPECT_EQ(interval_of({5}).low, 5);
  EXPECT_EQ(interval_of({5}).high, 5);
  EXPECT_EQ(paired_test({0, 0}).p.value(), 1);    // the same bits in both arms
  EXPECT_EQ(paired_test({-1, -1}).p.value(), 0);  // no noise at all
  EXPECT_THROW(static_cast<void>(paired_test({})), Error);
}

TEST(Inference, AnIntervalHasTheTruthInNineteenOfTwenty) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0.3, 2);
  int inside = 0;
  constexpr int kTimes = 20000;
  for (int i = 0; i < kTimes; ++i) {
    const Interval interval = interval_of({normal(random), normal(random), normal(random)});
    inside += interval.low < 0.3 && 0.3 < interval.high ? 1 : 0;
  }
  EXPECT_NEAR(inside, 0.95 * kTimes, 4 * std::sqrt(0.05 * 0.95 * kTimes));
}

TEST(Inference, HolmByHand) {
  const std::vector<double> adjusted = holm({0.01, 0.04, 0.03, 0.005});
  // Sorted 0.005, 0.01, 0.03, 0.04, times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04, which may not fall.
  EXPECT_DOUBLE_EQ(adjusted[3], 0.02);
  EXPECT_DOUBLE_EQ(adjusted[0], 0.03);
  EXPECT_DOUBLE_EQ(adjusted[2], 0.06);
  EXPECT_DOUBLE_EQ(adjusted[1], 0.06);
  EXPECT_EQ(holm({0.5, 0.9}), (std::vector<double>{1, 1}));
  EXPECT_EQ(holm({0.2}), (std::vector<double>{0.2}));
  EXPECT_TRUE(holm({}).empty());
}

TEST(Inference, Power) {
  const struct {
    double effect;
    int n;
    double level, power;
  } golden[] = {{1, 3, 0.05, 0.179255393777},
                {3, 3, 0.05, 0.745268007006},
                {1.5, 5, 0.05, 0.710702673926},
                {2, 5, 0.0125, 0.606279978509},
                {0.7, 16, 0.05, 0.744548608652},
                {2, 2, 0.05, 0.175707411098},
                {0, 6, 0.05, 0.05}};
  for (const auto& [effect, n, level, power] : golden) {
    EXPECT_NEAR(power_of(effect, n, level), power, 1e-8) << effect << " " << n;
  }
  for (const int n : {2, 3, 5, 16}) {
    for (const double level : {0.05, 0.05 / 8}) {
      EXPECT_NEAR(power_of(smallest_effect(n, level), n, level), 0.8, 1e-9) << n;
    }
  }
  EXPECT_LT(smallest_effect(16, 0.05), smallest_effect(5, 0.05));
}

TEST(Inference, PowerIsHowOftenATestFindsIt) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal(1.5, 1);
  int found = 0;
  constexpr int kTimes = 10000;
  for (int i = 0; i < kTimes; ++i) {
    std::vector<double> values(5);
    for (double& value : values) value = normal(random);
    found += paired_test(values).p.value() < 0.05 ? 1 : 0;
  }
  EXPECT_NEAR(found, 0.7107 * kTimes, 4 * std::sqrt(0.71 * 0.29 * kTimes));
}

TEST(Inference, ABootstrapHasTheErrorOfAMean) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal(2, 1);
  std::vector<BlockDifference> blocks(400);
  double sum = 0;
  double squares = 0;
  for (BlockDifference& block : blocks) {
    block = {.targets = 10, .nats = 10 * normal(random)};
    sum += block.nats / 10;
    squares += block.nats * block.nats / 100;
  }
  const double mean = sum / 400;
  const double error = std::sqrt((squares / 400 - mean * mean) / 400);
  const Bootstrap found = bootstrap(blocks);
  EXPECT_NEAR(found.error, error, 0.08 * error);
  EXPECT_NEAR(found.interval.low, mean - 1.96 * error, 0.25 * error);
  EXPECT_NEAR(found.interval.high, mean + 1.96 * error, 0.25 * error);
  EXPECT_EQ(bootstrap(blocks).error, found.error);
  EXPECT_NE(bootstrap(blocks, 2).error, found.error);
  EXPECT_EQ(bootstrap({{4, 2}}).error, 0);
  EXPECT_EQ(bootstrap({{4, 2}}).interval.low, 0.5);
  // A block weighs as much as it has targets.
  const Bootstrap uneven = bootstrap({{1000, 1000}, {1, 0}}, 1, 4000);
  EXPECT_GT(uneven.interval.high, 0.99);
  EXPECT_THROW(static_cast<void>(bootstrap({})), Error);
}

}  // namespace
}  // namespace switchyard::bench
