// Balancing without a loss: the bias that follows counts.
#include "switchyard/routing/selection_bias.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "switchyard/route.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

std::vector<float> updated(std::vector<float> bias, const std::vector<std::int64_t>& counts,
                           double rate, bool centered = false,
                           Communicator* communicator = nullptr) {
  update_selection_bias({.counts = {counts.data(), {std::ssize(counts)}},
                         .rate = rate,
                         .centered = centered,
                         .bias = {bias.data(), {std::ssize(bias)}},
                         .communicator = communicator});
  return bias;
}

using Floats = std::vector<float>;

TEST(SelectionBias, MovesByTheSignOfWhatIsMissingToTheMean) {
  EXPECT_EQ(updated({0, 1, -1, 0.5F}, {4, 0, 2, 2}, 0.25), (Floats{-0.25F, 1.25F, -1, 0.5F}));
  EXPECT_EQ(updated({1, 2}, {0, 0}, 0.25), (Floats{1, 2}));  // no tokens: all have the mean
  EXPECT_EQ(updated({1, 2}, {5, 0}, 0), (Floats{1, 2}));
  // The mean is no whole number, and is not rounded to one.
  EXPECT_EQ(updated({0, 0, 0}, {3, 3, 4}, 1), (Floats{1, 1, -1}));
}

TEST(SelectionBias, KeepsItsMeanWhereItIsCentered) {
  const Floats bias = updated({0, 0, 0, 0}, {9, 1, 1, 1}, 0.5, true);
  EXPECT_EQ(bias, (Floats{-0.75F, 0.25F, 0.25F, 0.25F}));
  EXPECT_EQ(std::accumulate(bias.begin(), bias.end(), 0.0F), 0.0F);
}

TEST(SelectionBias, IsTheSameOnAllRanksAndThatOfAllTheirCounts) {
  // Each rank by itself would move the other way.
  const std::vector<std::vector<std::int64_t>> counts{{9, 0, 3}, {0, 7, 3}, {0, 5, 2}};
  run_ranks(
      3,
      [&](Communicator& communicator) {
        const auto rank = static_cast<std::size_t>(communicator.rank());
        EXPECT_EQ(updated({0, 0, 0}, counts[rank], 1, false, &communicator), (Floats{1, -1, 1}));
        EXPECT_EQ(updated({0, 0, 0}, counts[rank], 1, false, &communicator), (Floats{1, -1, 1}));
      },
      std::chrono::milliseconds(20000));
}

TEST(SelectionBias, BalancesARouterThatPrefersOneExpert) {
  constexpr std::int64_t kTokens = 256;
  constexpr std::int32_t kExperts = 8;
  std::vector<float> logits = random_floats(kTokens * kExperts, 3);
  for (std::int64_t t = 0; t < kTokens; ++t) logits[static_cast<std::size_t>(t * kExperts)] += 2;
  Floats bias(kExperts);
  std::vector<std::int32_t> expert(kTokens * 2);
  Floats weight(expert.size());
  const auto counts = [&] {
    route({.logits = {logits.data(), {kTokens, kExperts}},
           .selection_bias = {bias.data(), {kExperts}},
           .config = {.num_experts = kExperts,
                      .kind = TopKRouter{.top_k = 2, .score = Score::kSigmoid}},
           .routing = {.expert = {expert.data(), {kTokens, 2}},
                       .weight = {weight.data(), {kTokens, 2}}}});
    std::vector<std::int64_t> result(kExperts);
    for (const std::int32_t e : expert) ++result[static_cast<std::size_t>(e)];
    return result;
  };
  EXPECT_GT(counts()[0], 200);  // of 64 on average
  for (int step = 0; step < 400; ++step) bias = updated(bias, counts(), 2e-3);
  for (const std::int64_t n : counts()) EXPECT_NEAR(static_cast<double>(n), 64, 10);
}

/// Thresholds of logits [T, 4] with a minus.
Floats quantiles(const Floats& logits, std::int32_t top_k, double momentum, Floats bias,
                 Communicator* communicator = nullptr) {
  update_thresholds({.logits = {logits.data(), {std::ssize(logits) / 4, 4}},
                     .top_k = top_k,
                     .momentum = momentum,
                     .bias = {bias.data(), {4}},
                     .communicator = communicator});
  return bias;
}

TEST(Thresholds, OfOneStepLetTheTokensThroughThatExpertChoiceWouldTake) {
  constexpr std::int64_t kTokens = 40;
  const Floats logits = random_floats(kTokens * 4, 5);
  const auto routed = [&](const Router& kind, const Floats& bias) {
    std::vector<std::int32_t> expert(kTokens * 4);
    Floats weight(expert.size());
    route({.logits = {logits.data(), {kTokens, 4}},
           .selection_bias = {bias.empty() ? nullptr : bias.data(), {std::ssize(bias)}},
           .config = {.num_experts = 4, .kind = kind},
           .routing = {.expert = {expert.data(), {kTokens, 4}},
                       .weight = {weight.data(), {kTokens, 4}}}});
    return expert;
  };
  for (const std::int32_t top_k : {1, 2, 3}) {
    const Floats bias = quantiles(logits, top_k, 0, Floats(4));
    EXPECT_EQ(routed(ExpertThresholdRouter{}, bias), routed(ExpertChoiceRouter{top_k}, {}));
  }
  const auto all = routed(ExpertThresholdRouter{}, quantiles(logits, 4, 0, Floats(4)));
  EXPECT_EQ(std::count(all.begin(), all.end(), -1), 0);
}

TEST(Thresholds, AreAMovingAverageAndStayWithoutTokens) {
  const Floats logits = random_floats(24 * 4, 6);
  const Floats now = quantiles(logits, 2, 0, Floats(4));
  const Floats before{-0.5F, -0.25F, 0, 1};
  const Floats mixed = quantiles(logits, 2, 0.75, before);
  for (std::size_t e = 0; e < 4; ++e) {
    EXPECT_FLOAT_EQ(mixed[e], 0.75F * before[e] + 0.25F * now[e]);
  }
  EXPECT_EQ(quantiles({}, 2, 0.75, before), before);
  EXPECT_EQ(quantiles(logits, 2, 1, before), before);
}

TEST(Thresholds, OverRanksAreTheMeanByTokensOnAll) {
  const Floats logits = random_floats(24 * 4, 7);
  const Floats first(logits.begin(), logits.begin() + 16 * 4);
  const Floats second(logits.begin() + 16 * 4, logits.end());
  const Floats a = quantiles(first, 1, 0, Floats(4));
  const Floats b = quantiles(second, 1, 0, Floats(4));
  run_ranks(
      3,
      [&](Communicator& communicator) {
        const int rank = communicator.rank();
        const Floats bias = quantiles(rank == 0   ? first
                                      : rank == 1 ? second
                                                  : Floats(),
                                      1, 0, Floats(4), &communicator);
        for (std::size_t e = 0; e < 4; ++e) EXPECT_NEAR(bias[e], (2 * a[e] + b[e]) / 3, 1e-6F);
      },
      std::chrono::milliseconds(20000));
}

TEST(Thresholds, BadInputIsNamed) {
  const Floats logits{1, 2, 3, std::numeric_limits<float>::quiet_NaN()};
  const auto wrong = [&](const char* words, std::int32_t top_k, double momentum) {
    test::expect_error(ErrorCode::kInvalidArgument, words,
                       [&] { (void)quantiles(logits, top_k, momentum, Floats(4)); });
  };
  wrong("top_k=5 is not in 1 to 4", 5, 0);
  wrong("momentum=1.5 is not in 0 to 1", 1, 1.5);
  wrong("token 0 for expert 3 is NaN", 1, 0.5);
}

TEST(SelectionBias, BadInputIsNamed) {
  const auto wrong = [](const char* words, const std::vector<std::int64_t>& counts, double rate) {
    test::expect_error(ErrorCode::kInvalidArgument, words, [&] {
      (void)updated({0, 0}, counts, rate);
    });
  };
  wrong("counts", {1, 2, 3}, 1);
  wrong("counts[1]=-2 is negative", {1, -2}, 1);
  wrong("rate=-1 is not a number from 0", {1, 2}, -1);
  wrong("rate=nan", {1, 2}, std::numeric_limits<double>::quiet_NaN());
}

}  // namespace
}  // namespace switchyard
