// Balancing without a loss: the bias that follows counts.
#include "switchyard/routing/selection_bias.hpp"

#include <gtest/gtest.h>

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
