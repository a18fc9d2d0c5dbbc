#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "switchyard/device.hpp"
#include "switchyard/route.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using Ids = std::vector<std::int32_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Outcome {
  std::vector<std::int32_t> expert;
  std::vector<float> weight;
  std::vector<float> top_score;
};

Outcome route_all(std::vector<float> logits, const RouterConfig& config,
                  std::vector<float> bias = {}, ThreadPool* pool = nullptr) {
  const std::int64_t num_tokens = std::ssize(logits) / config.num_experts;
  const std::int64_t top_k = config.top_k();
  Outcome out;
  out.expert.assign(static_cast<std::size_t>(num_tokens * top_k), -7);
  out.weight.assign(static_cast<std::size_t>(num_tokens * top_k), kNan);
  out.top_score.assign(static_cast<std::size_t>(num_tokens), kNan);
  route({.logits = {logits.data(), {num_tokens, config.num_experts}},
         .selection_bias = {bias.empty() ? nullptr : bias.data(), {std::ssize(bias)}},
         .config = config,
         .routing = {.expert = {out.expert.data(), {num_tokens, top_k}},
                     .weight = {out.weight.data(), {num_tokens, top_k}}},
         .request = {.top_score = {out.top_score.data(), {num_tokens}}},
         .execution = {.pool = pool}});
  return out;
}

TEST(Route, EqualScoresGoToTheLowerExpert) {
  for (const Score score :
       {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid, Score::kSparseMixer}) {
    const RouterConfig config{.num_experts = 4, .kind = TopKRouter{.top_k = 2, .score = score}};
    EXPECT_EQ(route_all({1.0F, 3.0F, 3.0F, 3.0F}, config).expert, (Ids{1, 2}));
    EXPECT_EQ(route_all({0.0F, -0.0F, -0.0F, 0.0F}, config).expert, (Ids{0, 1}));
    EXPECT_EQ(route_all({-0.0F, 0.0F, 0.0F, 1.0F}, config).expert, (Ids{3, 0}));
  }
}

TEST(Route, SaturatedScoresKeepTheOrderOfTheLogits) {
  const RouterConfig sigmoid{.num_experts = 3,
                             .kind = TopKRouter{.top_k = 2, .score = Score::kSigmoid}};
  EXPECT_EQ(route_all({30.0F, 40.0F, 50.0F}, sigmoid).expert, (Ids{2, 1}));
  const RouterConfig softmax{.num_experts = 3, .kind = TopKRouter{.top_k = 2}};
  EXPECT_EQ(route_all({-300.0F, 0.0F, -200.0F}, softmax).expert, (Ids{1, 2}));
}

TEST(Route, SoftmaxWeightsAreProbabilitiesAndRenormalisedOnesSumToTheScale) {
  const std::vector<float> logits{0.5F, -1.0F, 2.0F, 0.0F};
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  RouterConfig config{.num_experts = 4, .kind = TopKRouter{.top_k = 2, .renormalize = false}};
  Outcome out = route_all(logits, config);
  EXPECT_EQ(out.expert, (Ids{2, 0}));
  EXPECT_NEAR(out.weight[0], std::exp(2.0) / sum, 1e-6);
  EXPECT_NEAR(out.weight[1], std::exp(0.5) / sum, 1e-6);
  EXPECT_NEAR(out.top_score[0], std::exp(2.0) / sum, 1e-6);
  config.as_top_k().renormalize = true;
  config.as_top_k().scale = 2.5F;
  out = route_all(logits, config);
  EXPECT_NEAR(out.weight[0] + out.weight[1], 2.5, 1e-6);
  EXPECT_NEAR(out.weight[0] / out.weight[1], std::exp(1.5), 1e-5);
  EXPECT_NEAR(out.top_score[0], std::exp(2.0) / sum, 1e-6);
}

TEST(Route, SelectionBiasChoosesButDoesNotWeigh) {
  const RouterConfig config{
      .num_experts = 3,
      .kind = TopKRouter{.top_k = 1, .score = Score::kSigmoid, .renormalize = false}};
  const Outcome out = route_all({2.0F, 1.0F, 0.0F}, config, {0.0F, 0.0F, 0.9F});
  EXPECT_EQ(out.expert, (Ids{2}));
  EXPECT_FLOAT_EQ(out.weight[0], 0.5F);
  EXPECT_NEAR(out.top_score[0], 1 / (1 + std::exp(-2.0)), 1e-6);
}

TEST(Route, GroupsRankByTheirBestOrByTheSumOfTheirTwoBest) {
  // Group 0 has the best expert, group 1 the best pair.
  const std::vector<float> logits{3.0F, -9.0F, -9.0F, 2.0F, 1.9F, 1.8F};
  RouterConfig config{.num_experts = 6,
                      .kind = TopKRouter{.top_k = 2,
                                         .score = Score::kSigmoid,
                                         .groups = 2,
                                         .top_groups = 1,
                                         .group_score = GroupScore::kMax}};
  EXPECT_EQ(route_all(logits, config).expert, (Ids{0, 1}));
  config.as_top_k().group_score = GroupScore::kTop2Sum;
  EXPECT_EQ(route_all(logits, config).expert, (Ids{3, 4}));
}

TEST(Route, ExpertsOfOtherGroupsAreNeverChosenHoweverBadTheChosenGroupIs) {
  // Biased scores are negative: a mask of 0 instead of minus infinity would pick the others.
  for (const GroupScore score : {GroupScore::kMax, GroupScore::kTop2Sum}) {
    const RouterConfig config{.num_experts = 8,
                              .kind = TopKRouter{.top_k = 4,
                                                 .score = Score::kSigmoid,
                                                 .groups = 4,
                                                 .top_groups = 2,
                                                 .group_score = score}};
    const std::vector<float> bias{-5, -9, -6, -6, -4, -9, -7, -7};
    const Outcome out = route_all(std::vector<float>(8, 0.0F), config, bias);
    const Ids want = score == GroupScore::kMax ? (Ids{4, 0, 1, 5}) : (Ids{4, 2, 3, 5});
    EXPECT_EQ(out.expert, want);
  }
}

TEST(Route, EqualGroupsGoToTheLowerGroup) {
  const RouterConfig config{
      .num_experts = 6,
      .kind =
          TopKRouter{.top_k = 2, .groups = 3, .top_groups = 1, .group_score = GroupScore::kMax}};
  EXPECT_EQ(route_all({0, 0, 1, 0, 0, 1}, config).expert, (Ids{2, 3}));
}

TEST(Route, GroupsOfOneExpertWorkWithBothGroupScores) {
  for (const GroupScore score : {GroupScore::kMax, GroupScore::kTop2Sum}) {
    const RouterConfig config{
        .num_experts = 4,
        .kind = TopKRouter{.top_k = 2, .groups = 4, .top_groups = 2, .group_score = score}};
    EXPECT_EQ(route_all({1, 4, 2, 3}, config).expert, (Ids{1, 3}));
  }
}

TEST(Route, InfiniteLogitsGiveFiniteWeights) {
  for (const Score score :
       {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid, Score::kSparseMixer}) {
    for (const bool renormalize : {false, true}) {
      const RouterConfig config{
          .num_experts = 3,
          .kind = TopKRouter{.top_k = 2, .score = score, .renormalize = renormalize}};
      for (const auto& logits :
           {std::vector<float>{kInf, kInf, 0}, std::vector<float>{-kInf, 0, 1},
            std::vector<float>{-kInf, -kInf, -kInf}, std::vector<float>{-kInf, kInf, 0}}) {
        for (const float w : route_all(logits, config).weight) EXPECT_TRUE(std::isfinite(w)) << w;
      }
    }
  }
}

TEST(Route, ASparseMixerWeighsEachChoiceAmongThoseNearItThatAreLeft) {
  RouterConfig config{
      .num_experts = 5,
      .kind = TopKRouter{.top_k = 2, .score = Score::kSparseMixer, .renormalize = false}};
  // 4.95 is within 2% of 5, 4.86 of 4.95 but not of 5; 4.5 of neither. Of -2.01, -2.05 is, -2.1
  // not.
  Outcome out = route_all({4.86F, 5.0F, 4.5F, 4.95F, -5.0F}, config);
  EXPECT_EQ(out.expert, (Ids{1, 3}));
  EXPECT_NEAR(out.weight[0], 1 / (1 + std::exp(-0.05)), 1e-6);
  EXPECT_NEAR(out.weight[1], 1 / (1 + std::exp(-0.09)), 1e-6);
  out = route_all({-2.05F, -2.0F, -2.01F, -2.1F, -8.0F}, config);
  EXPECT_EQ(out.expert, (Ids{1, 2}));
  EXPECT_NEAR(out.weight[0], 1 / (1 + std::exp(-0.01)), 1e-6);
  EXPECT_NEAR(out.weight[1], 1 / (1 + std::exp(-0.04)), 1e-6);
  EXPECT_EQ(route_all({0, 0, 0, 0, 0}, config).weight, (std::vector<float>{0.2F, 0.25F}));
  config.as_top_k().renormalize = true;
  config.as_top_k().scale = 2.0F;
  out = route_all({0, 0, 0, 0, 0}, config);
  EXPECT_NEAR(out.weight[0], 2.0 * 4 / 9, 1e-6);
  EXPECT_NEAR(out.weight[1], 2.0 * 5 / 9, 1e-6);
}

TEST(Route, ASparseMixerWithGroupsOrASelectionBiasIsRefused) {
  RouterConfig config{.num_experts = 4,
                      .kind = TopKRouter{.top_k = 2, .score = Score::kSparseMixer}};
  expect_error(ErrorCode::kInvalidArgument, "a selection bias: the score sparse-mixer has none",
               [&] {
                 route_all({1, 2, 3, 4}, config, {0, 0, 0, 0});
               });
  config.as_top_k().groups = config.as_top_k().top_groups = 2;
  expect_error(ErrorCode::kInvalidArgument, "groups=2: the score sparse-mixer has none", [&] {
    route_all({1, 2, 3, 4}, config);
  });
}

TEST(Route, AGroupWhoseTwoBestAreOppositeInfinitiesIsTheWorst) {
  // Their sum is no number, and a NaN would make the choice depend on the order of comparisons.
  for (const std::size_t place : {0U, 2U, 4U}) {
    std::vector<float> logits{1, 2, 5, 6, 3, 4};
    logits[place] = kInf;
    logits[place + 1] = -kInf;
    const RouterConfig config{.num_experts = 6,
                              .kind = TopKRouter{.top_k = 4,
                                                 .score = Score::kTopkSoftmax,
                                                 .groups = 3,
                                                 .top_groups = 2,
                                                 .group_score = GroupScore::kTop2Sum}};
    const Ids want = place == 0   ? (Ids{3, 2, 5, 4})
                     : place == 2 ? (Ids{5, 4, 1, 0})
                                  : (Ids{3, 2, 1, 0});
    EXPECT_EQ(route_all(logits, config).expert, want) << place;
  }
}

TEST(Route, SigmoidsThatAllUnderflowStillNormalise) {
  const RouterConfig config{.num_experts = 2,
                            .kind = TopKRouter{.top_k = 2, .score = Score::kSigmoid}};
  const Outcome out = route_all({-200.0F, -201.0F}, config);
  EXPECT_NEAR(out.weight[0], 1 / (1 + std::exp(-1.0)), 1e-6);
  EXPECT_NEAR(out.weight[0] + out.weight[1], 1.0, 1e-6);
}

TEST(Route, AllExpertsInOrderWhenKIsE) {
  for (const std::int32_t num_experts : {1, 2, 7, 200}) {
    const std::vector<float> logits = random_floats(3 * num_experts, 5, 4.0F);
    const Outcome out =
        route_all(logits, {.num_experts = num_experts, .kind = TopKRouter{.top_k = num_experts}});
    for (int t = 0; t < 3; ++t) {
      const auto* ids = out.expert.data() + t * num_experts;
      const auto* row = logits.data() + t * num_experts;
      for (int k = 1; k < num_experts; ++k) ASSERT_GE(row[ids[k - 1]], row[ids[k]]);
      EXPECT_EQ(std::accumulate(ids, ids + num_experts, 0), num_experts * (num_experts - 1) / 2);
    }
  }
}

TEST(Route, FortyOf2000ExpertsAreTheFirstOfAStableSort) {
  constexpr std::int32_t kExperts = 2000;
  const std::vector<float> logits = random_floats(5 * kExperts, 8, 4.0F);
  const Outcome out = route_all(logits, {.num_experts = kExperts, .kind = TopKRouter{.top_k = 40}});
  for (int t = 0; t < 5; ++t) {
    Ids ids(kExperts);
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [row = logits.data() + t * kExperts](int a, int b) {
      return row[a] > row[b];
    });
    ids.resize(40);
    EXPECT_EQ(Ids(out.expert.begin() + t * 40, out.expert.begin() + (t + 1) * 40), ids);
  }
}

TEST(Route, NoTokenIsFine) {
  EXPECT_TRUE(route_all({}, {.num_experts = 4, .kind = TopKRouter{.top_k = 2}}).expert.empty());
}

TEST(Route, TheSameBitsForAnyNumberOfThreads) {
  const std::vector<float> logits = random_floats(333 * 24, 9);
  const std::vector<float> bias = random_floats(24, 10, 0.1F);
  for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
    const RouterConfig config{.num_experts = 24,
                              .kind = TopKRouter{.top_k = 5,
                                                 .score = score,
                                                 .groups = 4,
                                                 .top_groups = 2,
                                                 .group_score = GroupScore::kTop2Sum}};
    const Outcome alone = route_all(logits, config, bias);
    for (const int threads : {2, 3}) {
      ThreadPool pool(threads);
      const Outcome out = route_all(logits, config, bias, &pool);
      EXPECT_EQ(out.expert, alone.expert);
      EXPECT_EQ(out.weight, alone.weight);
      EXPECT_EQ(out.top_score, alone.top_score);
    }
  }
}

TEST(Route, OfManyNansOnManyThreadsTheLowestIsNamed) {
  constexpr std::int64_t kNumTokens = 4000;
  std::vector<float> logits(kNumTokens * 8, 1.0F);
  for (std::int64_t token = 5; token < kNumTokens; ++token) {
    logits[static_cast<std::size_t>(token * 8 + 7 - token % 8)] = kNan;
  }
  ThreadPool pool(4);
  for (int round = 0; round < 50; ++round) {  // whichever thread is first or last to report
    expect_error(ErrorCode::kInvalidArgument, "token 5 for expert 2 is NaN", [&] {
      route_all(logits, {.num_experts = 8, .kind = TopKRouter{.top_k = 2}}, {}, &pool);
    });
  }
}

TEST(Route, NanIsAnErrorThatNamesTheLowestTokenAndExpert) {
  std::vector<float> logits(100 * 8, 1.0F);
  logits[97 * 8 + 1] = kNan;
  logits[41 * 8 + 6] = kNan;
  logits[41 * 8 + 3] = -kNan;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    expect_error(ErrorCode::kInvalidArgument, "token 41 for expert 3 is NaN", [&] {
      route_all(logits, {.num_experts = 8, .kind = TopKRouter{.top_k = 2}}, {}, &pool);
    });
  }
}

TEST(Route, BrokenRulesAreNamedWithTheirValues) {
  const struct {
    RouterConfig config;
    const char* words;
  } cases[] = {
      {{.num_experts = 0, .kind = TopKRouter{.top_k = 1}}, "num_experts=0"},
      {{.num_experts = 4, .kind = TopKRouter{.top_k = 0}}, "top_k=0"},
      {{.num_experts = 2, .kind = TopKRouter{.top_k = 3}}, "top_k=3 exceeds num_experts=2"},
      {{.num_experts = 6, .kind = TopKRouter{.top_k = 1, .groups = 4}}, "groups=4 does not divide"},
      {{.num_experts = 6, .kind = TopKRouter{.top_k = 1, .groups = 0}}, "groups=0"},
      {{.num_experts = 6, .kind = TopKRouter{.top_k = 1, .groups = 2, .top_groups = 3}},
       "top_groups=3"},
      {{.num_experts = 6, .kind = TopKRouter{.top_k = 4, .groups = 2, .top_groups = 1}},
       "top_k=4 exceeds the 3"},
      {{.num_experts = 6, .kind = TopKRouter{.top_k = 1, .scale = kInf}}, "scale=inf"},
  };
  for (const auto& [config, words] : cases) {
    expect_error(ErrorCode::kInvalidArgument, words, [&c = config] { check(c); });
  }
}

TEST(Route, WrongShapesAndBiasesAreErrors) {
  std::vector<float> logits(8);
  std::vector<std::int32_t> expert(4);
  std::vector<float> weight(4);
  const RouteArgs good{
      .logits = {logits.data(), {2, 4}},
      .config = {.num_experts = 4, .kind = TopKRouter{.top_k = 2}},
      .routing = {.expert = {expert.data(), {2, 2}}, .weight = {weight.data(), {2, 2}}}};
  EXPECT_NO_THROW(route(good));
  RouteArgs args = good;
  args.logits.shape = {1, 8};
  EXPECT_THROW(route(args), Error);
  args = good;
  args.routing.weight.shape = {4, 1};
  EXPECT_THROW(route(args), Error);
  args = good;
  args.routing.expert.data = nullptr;
  EXPECT_THROW(route(args), Error);
  RoutingRecord record;
  args = good;
  args.request.record = &record;
  expect_error(ErrorCode::kInvalidArgument, "a record is asked of route", [&] { route(args); });
  expect_error(ErrorCode::kInvalidArgument, "selection_bias[1]", [&] {
    route_all(logits, good.config, {0, kNan, 0, 0});
  });
  if (find_gpus().missing != "not built in") return;  // a GPU's route would take what follows
  args = good;
  args.execution.backend = Backend::kCuda;
  expect_error(ErrorCode::kUnsupported, "cpu.scan", [&] { route(args); });
}

}  // namespace
}  // namespace switchyard
