// Statistics of a routing: golden values from plain numpy, limits, chance, both forms of
// assignments, bad input.
#include "switchyard/routing/metrics.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "testkit/expect_error.hpp"

namespace switchyard {
namespace {

using metrics::Routed;
using test::expect_error;

constexpr std::int64_t kTokens = 12;
constexpr std::int32_t kExperts = 5;
constexpr std::int64_t kTopK = 3;

Vector<const std::int64_t> view(const std::vector<std::int64_t>& values) {
  return {values.data(), {std::ssize(values)}};
}

/// The routing of the golden values, dense and as a list without its unused places.
struct Golden {
  std::vector<std::int32_t> expert, list, begin{0};
  std::vector<float> logits, weight, list_weight;
  std::vector<std::uint8_t> kept, list_kept;
  std::vector<std::int64_t> types;

  Golden() {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      types.push_back(t % 3);
      for (std::int64_t e = 0; e < kExperts; ++e) {
        logits.push_back(static_cast<float>((17 * t + 29 * e + 13 * t * e) % 23 - 11) / 8);
      }
      for (std::int64_t k = 0; k < kTopK; ++k) {
        const bool used = (t + k) % 7 != 6;
        expert.push_back(used ? static_cast<std::int32_t>((t * t + 2 * k) % kExperts) : -1);
        weight.push_back(static_cast<float>(1 + (3 * t + 5 * k) % 8) / 8);
        kept.push_back((5 * t + 3 * k) % 6 != 0 && t % 5 != 2 ? 1 : 0);
        if (!used) continue;
        list.push_back(expert.back());
        list_weight.push_back(weight.back());
        list_kept.push_back(kept.back());
      }
      begin.push_back(static_cast<std::int32_t>(list.size()));
    }
  }
  [[nodiscard]] Routed dense() const {
    return {.num_experts = kExperts,
            .assignments = DenseAssignments{.expert = {expert.data(), {kTokens, kTopK}},
                                            .weight = {weight.data(), {kTokens, kTopK}}},
            .kept = {kept.data(), {std::ssize(kept)}},
            .logits = {logits.data(), {kTokens, kExperts}}};
  }
  [[nodiscard]] Routed as_list() const {
    Routed a = dense();
    a.assignments = AssignmentList{.token_begin = {begin.data(), {std::ssize(begin)}},
                                   .expert = {list.data(), {std::ssize(list)}},
                                   .weight = {list_weight.data(), {std::ssize(list)}}};
    a.kept = {list_kept.data(), {std::ssize(list)}};
    return a;
  }
};

TEST(Metrics, OfALoadAreThoseOfNumpy) {
  const Golden golden;
  for (const Routed& a : {golden.dense(), golden.as_list()}) {
    const std::vector<std::int64_t> counts = metrics::counts(a);
    EXPECT_EQ(counts, (std::vector<std::int64_t>{6, 8, 2, 9, 7}));
    const metrics::Load load = metrics::load(view(counts));
    EXPECT_NEAR(load.cv, 0.3775951866748304, 1e-14);
    EXPECT_NEAR(load.cv_floor, 0.3535533905932738, 1e-14);
    EXPECT_NEAR(load.max_over_mean, 1.40625, 1e-14);
    EXPECT_NEAR(load.min_over_mean, 0.3125, 1e-14);
    EXPECT_NEAR(load.kl, 0.08647625180125096, 1e-14);
    EXPECT_NEAR(load.entropy, 0.9462692837461092, 1e-14);
    EXPECT_NEAR(load.effective_experts, 4.585786646803108, 1e-13);
    EXPECT_NEAR(load.gini, 0.2, 1e-14);
    EXPECT_EQ(load.dead_experts, 0);
    EXPECT_NEAR(metrics::rank_imbalance(view(counts), 2), 1.125, 1e-14);  // of 2 and 3 experts
  }
}

TEST(Metrics, ThreeEntropiesAreThoseOfNumpy) {
  const Golden golden;
  for (Routed a : {golden.dense(), golden.as_list()}) {
    metrics::Entropies found = metrics::entropies(a);
    EXPECT_NEAR(found.router, 1.3668609816342698, 1e-6);  // scores are float
    EXPECT_NEAR(found.marginal, 1.5292426655754325, 1e-6);
    EXPECT_NEAR(found.information, found.marginal - found.router, 1e-15);
    EXPECT_NEAR(found.weights.value(), 0.809268503225157, 1e-14);
    a.score = Score::kSigmoid;
    found = metrics::entropies(a);
    EXPECT_NEAR(found.router, 1.5315016247207556, 1e-6);
    EXPECT_NEAR(found.marginal, 1.5769931087310805, 1e-6);
  }
}

TEST(Metrics, DropsAreCountedByAssignmentsTokensMassAndChoice) {
  const Golden golden;
  const metrics::Drops found = metrics::drops(golden.dense());
  EXPECT_NEAR(found.assignments, 0.34375, 1e-14);
  EXPECT_NEAR(found.tokens, 0.16666666666666666, 1e-14);
  EXPECT_NEAR(found.mass.value(), 0.3407407407407408, 1e-14);
  ASSERT_EQ(found.by_choice.size(), 3U);
  EXPECT_NEAR(found.by_choice[0], 3.0 / 11, 1e-14);
  EXPECT_NEAR(found.by_choice[1], 4.0 / 11, 1e-14);
  EXPECT_NEAR(found.by_choice[2], 0.4, 1e-14);
  const metrics::Drops list = metrics::drops(golden.as_list());
  EXPECT_EQ(list.assignments, found.assignments);
  EXPECT_EQ(list.tokens, found.tokens);
  EXPECT_EQ(list.mass, found.mass);
  EXPECT_EQ(metrics::padding_waste(30, 40), 0.25);
}

TEST(Metrics, CoactivationAndChurnAreThoseOfNumpy) {
  const Golden golden;
  const std::vector<double> want = {1.0,      0.333333, 0.333333, 0.5, 0.5, 0.25,     1.0,
                                    0.0,      1.0,      0.5,      1.0, 0.0, 1.0,      0.0,
                                    1.0,      0.333333, 0.888889, 0.0, 1.0, 0.444444, 0.428571,
                                    0.571429, 0.285714, 0.571429, 1.0};
  std::vector<std::int32_t> later;
  for (std::int64_t i = 0; i < kTokens * kTopK; ++i) {
    later.push_back(static_cast<std::int32_t>((i / kTopK + 2 * (i % kTopK)) % kExperts));
  }
  const DenseAssignments after{.expert = {later.data(), {kTokens, kTopK}}};
  for (const Routed& a : {golden.dense(), golden.as_list()}) {
    const std::vector<double> found = metrics::coactivation(a);
    ASSERT_EQ(found.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(found[i], want[i], 5e-7) << i;
    EXPECT_NEAR(metrics::churn(a.assignments, after), 0.21875, 1e-14);
    EXPECT_EQ(metrics::churn(a.assignments, a.assignments), 0);
  }
}

TEST(Metrics, InformationOfTypesIsThatOfNumpyWithMillersAndMadowsBias) {
  const Golden golden;
  for (const Routed& a : {golden.dense(), golden.as_list()}) {
    const auto found = metrics::information(view(golden.types), a, 0);
    EXPECT_NEAR(found.plug_in, 0.04910192860176288, 1e-14);
    EXPECT_NEAR(found.bias, 0.109375, 1e-14);
    EXPECT_NEAR(found.corrected, found.plug_in - found.bias, 1e-15);
    EXPECT_NEAR(found.normalised, 0.044734700707834876, 1e-14);
    EXPECT_FALSE(found.p.has_value());
  }
}

TEST(Metrics, InformationTellsARouterOfTypesFromChance) {
  std::mt19937 random(5);
  std::vector<std::int64_t> types;
  std::vector<std::int32_t> sure;
  std::vector<std::int32_t> chance;
  for (int t = 0; t < 400; ++t) {
    types.push_back(static_cast<std::int64_t>(random() % 4));
    sure.push_back(static_cast<std::int32_t>(types.back()));
    chance.push_back(static_cast<std::int32_t>(random() % 4));
  }
  const auto of = [&](const std::vector<std::int32_t>& ids) {
    const Routed a{.num_experts = 4,
                   .assignments = DenseAssignments{.expert = {ids.data(), {400, 1}}}};
    return metrics::information(view(types), a);
  };
  EXPECT_NEAR(of(sure).normalised, 1, 1e-12);
  EXPECT_LT(of(sure).p.value(), 0.02);
  const auto none = of(chance);
  EXPECT_GT(none.p.value(), 0.02);
  EXPECT_LT(std::abs(none.corrected), 0.02);
  EXPECT_NEAR(none.null_mean.value(), none.bias, 0.006);
  EXPECT_EQ(none.null_mean, of(chance).null_mean);  // of a seed
}

TEST(Metrics, TheFloorOfCvIsWhatUniformRandomRoutingHas) {
  std::mt19937 random(3);
  double squares = 0;
  double floor = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int64_t> counts(16);
    for (int i = 0; i < 800; ++i) ++counts[random() % 16];
    const metrics::Load load = metrics::load(view(counts));
    squares += load.cv * load.cv / 300;
    floor = load.cv_floor;
  }
  EXPECT_NEAR(std::sqrt(squares), floor, 0.006);
}

TEST(Metrics, OneExpertThatHasAllIsOneEffectiveExpertAndNoneAtAllIsNoNaN) {
  const metrics::Load one = metrics::load(view({0, 12, 0, 0}));
  EXPECT_NEAR(one.effective_experts, 1, 1e-14);
  EXPECT_EQ(one.dead_experts, 3);
  EXPECT_EQ(one.max_over_mean, 4);
  EXPECT_NEAR(one.kl, std::log(4), 1e-14);
  EXPECT_EQ(metrics::rank_imbalance(view({3, 5, 0, 0}), 2), 2);
  const metrics::Load none = metrics::load(view({0, 0}));
  EXPECT_EQ(none.cv, 0);
  EXPECT_EQ(none.cv_floor, 0);
  EXPECT_EQ(none.dead_experts, 2);
  EXPECT_EQ(metrics::rank_imbalance(view({0, 0}), 2), 0);
  EXPECT_EQ(metrics::load(view({7})).entropy, 1);
}

TEST(Metrics, OfARoutingAreWhatCanBeSaidOfIt) {
  const Golden golden;
  Routed a = golden.dense();
  const metrics::Routing all = metrics::routing(a, 5);
  EXPECT_TRUE(all.entropies && all.drops);
  EXPECT_NEAR(all.rank_imbalance.value(), all.load.max_over_mean, 1e-14);
  a.logits = {};
  a.kept = {};
  const std::vector<std::int64_t> before = {10, 0, 0, 0, 0};
  a.counts = view(before);
  const metrics::Routing some = metrics::routing(a);
  EXPECT_FALSE(some.entropies || some.drops || some.rank_imbalance);
  EXPECT_EQ(some.load.dead_experts, 4);
}

TEST(Metrics, WhatDoesNotFitIsRefusedByName) {
  const Golden golden;
  const auto refused = [](const char* words, const auto& call) {
    expect_error(ErrorCode::kInvalidArgument, words, call);
  };
  refused("ranks=4 of 3 experts", [] { (void)metrics::rank_imbalance(view({1, 2, 3}), 4); });
  refused("counts[1] is -2", [] { (void)metrics::load(view({1, -2})); });
  refused("30 rows are used of 20", [] { (void)metrics::padding_waste(30, 20); });
  refused("types are of 1 tokens, the routing of 12",
          [&] { (void)metrics::information(view({1}), golden.dense()); });
  Routed a = golden.dense();
  a.num_experts = 4;
  refused("is 4, want -1 (unused) or less than 4", [&] { (void)metrics::counts(a); });
  a = golden.as_list();
  a.kept.shape[0] -= 1;
  refused("kept is [31], want [32]", [&] { (void)metrics::drops(a); });
  a = golden.dense();
  a.logits = {};
  refused("entropies are of logits", [&] { (void)metrics::entropies(a); });
  a.kept = {};
  refused("drops are of what is kept", [&] { (void)metrics::drops(a); });
  const std::vector<std::int32_t> nobody = {-1, -1};
  const Routed empty{.num_experts = 4,
                     .assignments = DenseAssignments{.expert = {nobody.data(), {2, 1}}}};
  refused("no token has an expert", [&] { (void)metrics::information(view({0, 1}), empty); });
}

}  // namespace
}  // namespace switchyard
