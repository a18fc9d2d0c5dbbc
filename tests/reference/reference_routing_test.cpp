#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "reference/reference.hpp"

// The oracle's own tests of routing and capacity: right choices pass, changed ones do not.

namespace switchyard::reference {
namespace {

std::vector<Bounded> exact(const std::vector<float>& values) {
  std::vector<Bounded> result;
  for (const float value : values) result.push_back({double{value}, 0});
  return result;
}

struct Choice {
  RouterConfig config;
  std::vector<Bounded> logits;
  std::vector<float> bias;

  std::string check(const std::vector<std::int32_t>& chosen) const {
    return check_choice(config, token_scores(config, logits, bias), tie_classes(logits, bias),
                        chosen);
  }
  std::vector<std::int32_t> choose() const {
    return reference::choose(config, token_scores(config, logits, bias));
  }
};

TEST(ReferenceRouter, AdmitsItsOwnChoiceForEveryRule) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 600; ++round) {
    Choice c;
    c.config = {.num_experts = 12, .kind = TopKRouter{.top_k = 1 + round % 4}};
    c.config.as_top_k().score = static_cast<Score>(round % 3);
    c.config.as_top_k().groups = round % 2 == 0 ? 1 : 3;
    c.config.as_top_k().top_groups = c.config.as_top_k().groups == 1 ? 1 : 2;
    c.config.as_top_k().group_score = static_cast<GroupScore>(round / 3 % 2);
    std::vector<float> logits(12);
    for (float& logit : logits) {
      logit = round % 5 == 0 ? std::round(normal(random)) : normal(random);  // Ties, too.
    }
    c.logits = exact(logits);
    if (round % 7 < 3) c.bias.assign(12, 0.25F * normal(random));
    const auto chosen = c.choose();
    ASSERT_EQ(c.check(chosen), "") << round;

    // Any other expert in the last place is a miss, unless the scores are equal within the bounds.
    const TokenScores scores = token_scores(c.config, c.logits, c.bias);
    for (std::int32_t e = 0; e < 12; ++e) {
      auto wrong = chosen;
      wrong.back() = e;
      if (std::find(chosen.begin(), chosen.end(), e) != chosen.end()) {
        if (e != chosen.back()) {
          ASSERT_NE(c.check(wrong), "") << round;
        }
      } else if (c.config.as_top_k().groups == 1) {
        ASSERT_NE(c.check(wrong), "") << round << " " << e;
      }
    }
  }
}

TEST(ReferenceRouter, TiesGoToTheLowerExpert) {
  const Choice c{{.num_experts = 4, .kind = TopKRouter{.top_k = 2}}, exact({1, 3, 3, 3}), {}};
  EXPECT_EQ(c.choose(), (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(c.check({1, 2}), "");
  EXPECT_NE(c.check({2, 1}), "");
  EXPECT_NE(c.check({1, 3}), "");
  EXPECT_NE(c.check({2, 3}), "");
}

TEST(ReferenceRouter, TiesBetweenGroupsGoToTheLowerGroup) {
  const Choice c{
      {.num_experts = 4, .kind = TopKRouter{.top_k = 1, .groups = 2}}, exact({2, 1, 1, 2}), {}};
  EXPECT_EQ(c.choose(), (std::vector<std::int32_t>{0}));
  EXPECT_EQ(c.check({0}), "");
  EXPECT_NE(c.check({3}), "");
}

TEST(ReferenceRouter, NearTiesMayGoEitherWay) {
  Choice c{{.num_experts = 3, .kind = TopKRouter{.top_k = 1}}, exact({1.0F, 2.0F, 2.0000002F}), {}};
  EXPECT_EQ(c.check({1}), "");
  EXPECT_EQ(c.check({2}), "");
  EXPECT_NE(c.check({0}), "");
  c.logits[2].value = 2.001;
  EXPECT_NE(c.check({1}), "");
}

TEST(ReferenceRouter, AnExpertOutsideTheBestGroupsIsAMiss) {
  const Choice c{{.num_experts = 6,
                  .kind = TopKRouter{.top_k = 2,
                                     .score = Score::kSigmoid,
                                     .groups = 3,
                                     .top_groups = 1,
                                     .group_score = GroupScore::kTop2Sum}},
                 exact({3.0F, -3.0F, 1.5F, 1.5F, 2.0F, -1.0F}),
                 {}};
  EXPECT_EQ(c.choose(), (std::vector<std::int32_t>{2, 3}));  // Best pair, not best expert.
  EXPECT_EQ(c.check({2, 3}), "");
  EXPECT_NE(c.check({0, 1}), "");
  EXPECT_NE(c.check({0, 2}), "");
}

TEST(ReferenceRouter, TheSelectionBiasMovesTheChoiceButNoWeight) {
  const Choice c{{.num_experts = 3,
                  .kind = TopKRouter{.top_k = 1, .score = Score::kSigmoid, .renormalize = false}},
                 exact({1.0F, 0.0F, -1.0F}),
                 {0.0F, 0.0F, 2.0F}};
  EXPECT_EQ(c.choose(), (std::vector<std::int32_t>{2}));
  EXPECT_NE(c.check({0}), "");
  const auto weights = chosen_weights(c.config, c.logits, c.choose());
  EXPECT_NEAR(weights[0].value, 1 / (1 + std::exp(1.0)), 1e-12);
}

TEST(ReferenceRouter, WeightsOffByATenThousandthAreAMiss) {
  for (const Score score :
       {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid, Score::kSparseMixer}) {
    for (const bool renormalize : {false, true}) {
      const RouterConfig config{
          .num_experts = 4,
          .kind =
              TopKRouter{.top_k = 2, .score = score, .renormalize = renormalize, .scale = 2.5F}};
      const Choice c{config, exact({0.5F, -1.0F, 2.0F, 1.0F}), {}};
      const auto expected = chosen_weights(c.config, c.logits, c.choose());
      std::vector<float> weights;
      for (const Bounded w : expected) weights.push_back(static_cast<float>(w.value));
      EXPECT_EQ(check_weights(expected, weights), "");
      weights[1] *= 1.0001F;
      EXPECT_NE(check_weights(expected, weights), "");
    }
  }
}

TEST(ReferenceRouter, AddsOrRemovesNothingInTheLogits) {
  const std::vector<double> tokens{1, 2, 3, -1, 0.5, 2};
  const std::vector<float> gate{1, 0, 2, 0.5F, -1, 1};
  const std::vector<float> bias{10, 20};
  const auto logits = router_logits(tokens, 3, 2, {.gate = gate, .bias = bias});
  EXPECT_EQ(logits[0].value, 17);
  EXPECT_EQ(logits[1].value, 21.5);
  EXPECT_EQ(logits[2].value, 13);
  EXPECT_EQ(logits[3].value, 21);
  EXPECT_LT(logits[0].error, 1e-5);
  EXPECT_GT(logits[0].error, 1e-7);
}

TEST(ReferenceCapacity, EveryChangeOfAMaskIsAMiss) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const std::int64_t top_k = 1 + round % 3;
    std::vector<std::int32_t> expert;
    std::vector<float> weight;
    std::vector<Bounded> score;
    for (int t = 0; t < 9; ++t) {
      for (int k = 0; k < top_k; ++k) {
        expert.push_back(static_cast<std::int32_t>(random() % 5) - 1);
        weight.push_back(static_cast<float>(random() % 6) / 8);
      }
      score.push_back({static_cast<double>(random() % 6) / 8, 0});
    }
    for (const auto policy :
         {DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs, DropPolicy::kBpr}) {
      const Wanted wanted{.expert = expert,
                          .weight = weight,
                          .top_score = score,
                          .top_k = top_k,
                          .capacity = 1 + round % 4,
                          .policy = policy};
      auto kept = kept_mask(wanted);
      ASSERT_EQ(check_kept(wanted, kept), "");
      for (std::size_t i = 0; i < kept.size(); ++i) {
        kept[i] ^= 1;
        ASSERT_NE(check_kept(wanted, kept), "");
        for (std::size_t j = 0; j < i; ++j) {  // Two swapped: the count is right again.
          if (expert[i] != expert[j] || kept[i] == kept[j]) continue;
          kept[j] ^= 1;
          if (kept[i] != kept[j]) {
            ASSERT_NE(check_kept(wanted, kept), "");
          }
          kept[j] ^= 1;
        }
        kept[i] ^= 1;
      }
    }
  }
}

TEST(ReferenceCapacity, NoLimitKeepsAllThatNameAnExpert) {
  const std::vector<std::int32_t> expert{0, -1, 0, 0};
  const std::vector<float> weight{1, 1, 1, 1};
  const Wanted wanted{.expert = expert, .weight = weight, .top_k = 2};
  EXPECT_EQ(kept_mask(wanted), (std::vector<std::uint8_t>{1, 0, 1, 1}));
}

}  // namespace
}  // namespace switchyard::reference
