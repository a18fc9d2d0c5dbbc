// Auxiliary losses: golden values, their evenness, gradients by finite differences, bad input.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "switchyard/names.hpp"
#include "switchyard/routing/relu_l1.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/losses_checks.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using test::HostSums;
using test::LossCase;
using test::losses_on_cpu;
using test::LossResult;

/// The six tokens of the golden values, on which an independent oracle has routed.
LossCase golden(std::int32_t top_k, const LossConfig& config) {
  LossCase c(6, 4, top_k, Score::kSoftmax, config);
  c.logits = {-1.375F, -0.625F, 0.125F,  0.875F, 0.75F,  0.25F,   -0.25F, -0.75F,
              0.0F,    1.125F,  -0.625F, 0.5F,   -0.75F, -0.875F, -1.0F,  -1.125F,
              1.375F,  0.0F,    -1.375F, 0.125F, 0.625F, 0.875F,  1.125F, 1.375F};
  const std::vector<std::int32_t> two = {3, 2, 0, 1, 1, 3, 0, 1, 0, 3, 3, 2};
  for (std::size_t t = 0; t < 6; ++t) {
    for (std::size_t k = 0; k < static_cast<std::size_t>(top_k); ++k) {
      c.expert[t * static_cast<std::size_t>(top_k) + k] = two[2 * t + k];
    }
  }
  return c;
}

TEST(Losses, GoldenValuesOfAnIndependentOracleHold) {
  const auto of = [](std::int32_t top_k, BalanceShare share) {
    return losses_on_cpu(golden(top_k, {.share = share})).values;
  };
  EXPECT_NEAR(of(2, BalanceShare::kAssignments).balance, 1.032987, 5e-7);
  EXPECT_NEAR(of(2, BalanceShare::kTokens).balance, 2.065974, 5e-7);
  EXPECT_NEAR(of(2, BalanceShare::kFirstChoice).balance, 1.123946, 5e-7);
  EXPECT_NEAR(of(1, BalanceShare::kAssignments).balance, 1.123946, 5e-7);
  EXPECT_NEAR(of(2, BalanceShare::kAssignments).z, 2.895639, 5e-7);
  EXPECT_NEAR(of(2, BalanceShare::kAssignments).importance, 0.031762, 5e-7);
}

TEST(Losses, BalanceDeviceAndCommunicationAreOneWhereAllIsEvenForEveryK) {
  for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
    for (std::int32_t top_k = 1; top_k <= 6; ++top_k) {
      LossCase c(12, 6, top_k, score, {.devices = 3, .devices_per_token = 3});
      std::fill(c.logits.begin(), c.logits.end(), 0.25F);
      for (std::size_t i = 0; i < c.expert.size(); ++i) {
        c.expert[i] = static_cast<std::int32_t>(i % 6);
      }
      EXPECT_DOUBLE_EQ(losses_on_cpu(c).values.balance, 1) << top_k;
      EXPECT_DOUBLE_EQ(losses_on_cpu(c).values.device, 1) << top_k;
      EXPECT_NEAR(losses_on_cpu(c).values.importance, 0, 1e-15) << top_k;
      if (top_k >= 5) {  // a token is sent to all devices
        EXPECT_DOUBLE_EQ(losses_on_cpu(c).values.communication, 1) << top_k;
      }
      c.losses.share = BalanceShare::kTokens;
      EXPECT_DOUBLE_EQ(losses_on_cpu(c).values.balance, top_k);
    }
  }
}

TEST(Losses, OneExpertThatHasAllMakesBalanceAsLargeAsTheNumberOfExperts) {
  LossCase c(10, 5, 1, Score::kSoftmax, {.balance = 1});
  std::fill(c.logits.begin(), c.logits.end(), -100.0F);
  for (std::size_t t = 0; t < 10; ++t) c.logits[5 * t + 2] = 100.0F;
  std::fill(c.expert.begin(), c.expert.end(), 2);
  EXPECT_DOUBLE_EQ(losses_on_cpu(c).values.balance, 5);
}

TEST(Losses, EveryLossOfEveryScopeShareAndScoreAgreesWithDifferencesOfTheReference) {
  const auto run = [](const LossCase& c) { return losses_on_cpu(c); };
  test::expect_every_loss(9, 6, 2, run);
  test::expect_every_loss(12, 4, 1, run);
  test::expect_every_loss(6, 5, 5, run);
}

TEST(Losses, PlacesThatAreUnusedCountForNobody) {
  LossCase c(6, 6, 3, Score::kSoftmax,
             {.balance = 1, .communication = 1, .devices = 2, .devices_per_token = 2});
  for (std::size_t i = 0; i < c.expert.size(); i += 2) c.expert[i] = -1;
  test::expect_reference(c, losses_on_cpu(c));
  std::fill(c.expert.begin(), c.expert.end(), -1);
  test::expect_reference(c, losses_on_cpu(c));
  EXPECT_EQ(losses_on_cpu(c).values.balance, 0);
}

TEST(Losses, LogitsThatSaturateHaveFiniteGradients) {
  const LossConfig all{.balance = 1, .importance = 1, .entropy = 1};
  for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
    for (const float size : {200.0F, 1e10F}) {
      for (const float dlogit : losses_on_cpu(LossCase(20, 7, 2, score, all, size)).dlogits) {
        ASSERT_TRUE(std::isfinite(dlogit)) << static_cast<int>(score) << " " << size;
      }
    }
  }
}

TEST(Losses, AListGivesTheSumsOfTheSameDenseRouting) {
  const LossCase c(6, 6, 2, Score::kSigmoid, {.devices = 3});
  HostSums dense(2, 6, 3);
  HostSums list(2, 6, 3);
  const auto add_up = [&](const AnyAssignments& assignments, HostSums& sums) {
    routing_sums({.logits = c.logits_view(),
                  .assignments = assignments,
                  .score = Score::kSigmoid,
                  .sums = sums.view()});
  };
  const std::vector<std::int32_t> begin = {0, 2, 4, 6, 8, 10, 12};
  add_up(DenseAssignments{.expert = c.expert_view()}, dense);
  add_up(AssignmentList{.token_begin = {begin.data(), {7}}, .expert = {c.expert.data(), {12}}},
         list);
  EXPECT_EQ(list, dense);
  EXPECT_EQ(std::accumulate(dense.counts.begin(), dense.counts.end(), std::int64_t{0}), 12);
}

TEST(Losses, RouteAtOnceIsNoiseChoiceAndSumsInTurn) {
  const LossCase c(30, 6, 2, Score::kSoftmax, {});
  RouterConfig router = c.router;
  router.noise = {.kind = RouterNoise::Kind::kLogits, .size = 0.5F};
  const RouteRequest request{.seed = 3, .step = 4, .training = true};
  std::vector<float> logits = c.logits;
  std::vector<std::int32_t> expert(60);
  std::vector<float> weight(60);
  HostSums sums(2, 6, 3);
  const Matrix<float> noisy{logits.data(), {30, 6}};
  const Routing routing{.expert = {expert.data(), {30, 2}}, .weight = {weight.data(), {30, 2}}};
  route_at_once(
      {.route = {.logits = noisy, .config = router, .routing = routing, .request = request},
       .noisy_logits = noisy,
       .sums = sums.view()});

  std::vector<float> want = c.logits;
  add_noise({.logits = {want.data(), {30, 6}}, .noise = router.noise, .request = request});
  EXPECT_EQ(logits, want);
  EXPECT_NE(logits, c.logits);
  std::vector<std::int32_t> chosen(60);
  std::vector<float> weights(60);
  route({.logits = {want.data(), {30, 6}},
         .config = router,
         .routing = {.expert = {chosen.data(), {30, 2}}, .weight = {weights.data(), {30, 2}}},
         .request = request});
  EXPECT_EQ(expert, chosen);
  EXPECT_EQ(weight, weights);
  HostSums summed(2, 6, 3);
  routing_sums({.logits = {want.data(), {30, 6}},
                .assignments = DenseAssignments{.expert = {chosen.data(), {30, 2}}},
                .sums = summed.view()});
  EXPECT_EQ(sums, summed);

  const RouteArgs quiet{.logits = noisy, .config = c.router, .routing = routing};
  expect_error(ErrorCode::kInvalidArgument, "without noise on its logits",
               [&] { route_at_once({.route = quiet, .noisy_logits = noisy}); });
  RouteArgs nulls = quiet;
  nulls.config.kind = AdaMoeRouter{};
  expect_error(ErrorCode::kInvalidArgument, "as many logits as experts",
               [&] { route_at_once({.route = nulls, .sums = sums.view()}); });
  RouteArgs others = quiet;
  others.config = router;
  others.logits.data = want.data();
  expect_error(ErrorCode::kInvalidArgument, "not the logits that are routed",
               [&] { route_at_once({.route = others, .noisy_logits = noisy}); });
}

TEST(Losses, AnyNumberOfThreadsGivesTheSameBits) {
  const LossCase c(2000, 12, 3, Score::kSoftmax,
                   {.balance = 1,
                    .z = 1,
                    .importance = 1,
                    .entropy = 1,
                    .scope = LossScope::kSequence,
                    .sequence_length = 500});
  const LossResult alone = losses_on_cpu(c);
  for (const int threads : {2, 3}) {
    ThreadPool pool(threads);
    const LossResult result = losses_on_cpu(c, {.pool = &pool});
    EXPECT_EQ(result.dlogits, alone.dlogits);
    EXPECT_EQ(result.values, alone.values);
  }
}

TEST(Losses, TheirGradientIsAddedToThatOfTheChoice) {
  const LossCase c(8, 5, 2, Score::kSoftmax, {.balance = 1, .z = 1});
  const std::vector<float> of_losses = losses_on_cpu(c).dlogits;
  const std::vector<float> dweight = random_floats(16, 3);
  const auto back = [&](const LossPrices& prices) {
    std::vector<float> dlogits(40);
    route_backward({.logits = c.logits_view(),
                    .expert = c.expert_view(),
                    .dweight = {dweight.data(), {8, 2}},
                    .config = c.router,
                    .losses = prices,
                    .dlogits = {dlogits.data(), {8, 5}}});
    return dlogits;
  };
  HostSums sums(1, 5, 1);
  routing_sums({.logits = c.logits_view(),
                .assignments = DenseAssignments{.expert = c.expert_view()},
                .sums = sums.view()});
  std::vector<float> prices(5);
  const std::vector<float> choice = back({});
  const std::vector<float> both = back(router_losses({.sums = sums.view(),
                                                      .num_tokens = 8,
                                                      .config = c.losses,
                                                      .score_prices = {prices.data(), {1, 5}}}));
  for (std::size_t i = 0; i < both.size(); ++i) {
    EXPECT_NEAR(both[i], choice[i] + of_losses[i], 1e-6) << i;
  }
}

/// Inputs of the load's estimator in double and as they are given.
struct NoisyRouter {
  std::int64_t num_tokens = 6;
  std::int64_t num_experts = 4;
  std::int32_t top_k = 2;
  std::vector<double> clean{}, noise{}, deviation{};

  [[nodiscard]] std::vector<double> noisy() const {
    std::vector<double> result(clean);
    for (std::size_t i = 0; i < clean.size(); ++i) result[i] += noise[i] * deviation[i];
    return result;
  }
  [[nodiscard]] double loss() const {
    return reference::cv_squared(
        reference::noisy_load(num_experts, top_k, clean, noisy(), deviation));
  }
};

NoisyRouter golden_noise() {
  NoisyRouter router;
  const LossCase c = golden(2, {});
  router.clean.assign(c.logits.begin(), c.logits.end());
  router.deviation.assign(24, 0.5);
  for (int t = 0; t < 6; ++t) {
    for (int e = 0; e < 4; ++e) router.noise.push_back(((t * 5 + e * 3) % 7 - 3) / 3.0);
  }
  return router;
}

struct LoadResult {
  std::vector<double> load;
  double loss = 0;
  std::vector<float> dclean, ddeviation;
};

LoadResult load_of(const NoisyRouter& router, const Execution& execution = {}) {
  const std::array<std::int64_t, 2> shape = {router.num_tokens, router.num_experts};
  const std::vector<float> clean(router.clean.begin(), router.clean.end());
  const std::vector<double> exact = router.noisy();
  const std::vector<float> noisy(exact.begin(), exact.end());
  const std::vector<float> deviation(router.deviation.begin(), router.deviation.end());
  LoadResult result{.load = std::vector<double>(static_cast<std::size_t>(router.num_experts)),
                    .dclean = std::vector<float>(clean.size()),
                    .ddeviation = std::vector<float>(clean.size())};
  const NoisyLoadArgs args{.clean = {clean.data(), shape},
                           .noisy = {noisy.data(), shape},
                           .deviation = {deviation.data(), shape},
                           .top_k = router.top_k,
                           .load = {result.load.data(), {router.num_experts}},
                           .execution = execution};
  noisy_load(args);
  std::vector<double> dload(result.load.size());
  result.loss = cv_squared({result.load.data(), {router.num_experts}}, 1,
                           {dload.data(), {router.num_experts}});
  std::vector<float> dnoisy(clean.size());
  noisy_load_backward({.forward = args,
                       .dload = {dload.data(), {router.num_experts}},
                       .dclean = {result.dclean.data(), shape},
                       .dnoisy = {dnoisy.data(), shape},
                       .ddeviation = {result.ddeviation.data(), shape}});
  for (std::size_t i = 0; i < dnoisy.size(); ++i) {
    result.dclean[i] += dnoisy[i];
    result.ddeviation[i] += static_cast<float>(router.noise[i]) * dnoisy[i];
  }
  return result;
}

TEST(NoisyLoad, GoldenValuesOfAnIndependentOracleHold) {
  const LoadResult result = load_of(golden_noise());
  const std::vector<double> want = {2.931289, 3.403032, 2.625926, 3.996492};
  for (std::size_t e = 0; e < 4; ++e) EXPECT_NEAR(result.load[e], want[e], 1e-6);
  EXPECT_NEAR(result.loss, 0.025525, 5e-7);
}

TEST(NoisyLoad, GradientsOfItsLossAgreeWithDifferencesOfTheReference) {
  NoisyRouter router{.num_tokens = 7, .num_experts = 5, .top_k = 3};
  for (const float x : random_floats(35, 4)) router.clean.push_back(double{x});
  for (const float x : random_floats(35, 8)) router.noise.push_back(double{x});
  for (const float x : random_floats(35, 9)) router.deviation.push_back(0.4 + 0.1 * std::abs(x));
  const LoadResult result = load_of(router);
  const auto slope = [&](double& x) {
    const double at = x;
    x = at + 1e-5;
    const double above = router.loss();
    x = at - 1e-5;
    const double below = router.loss();
    x = at;
    return (above - below) / 2e-5;
  };
  for (std::size_t i = 0; i < 35; ++i) {
    EXPECT_NEAR(result.dclean[i], slope(router.clean[i]), 2e-6) << i;
    EXPECT_NEAR(result.ddeviation[i], slope(router.deviation[i]), 2e-6) << i;
  }
}

TEST(NoisyLoad, ItIsRefusedWhereEveryExpertIsChosen) {
  NoisyRouter router = golden_noise();
  router.top_k = 4;
  expect_error(ErrorCode::kInvalidArgument, "top_k=4", [&] { (void)load_of(router); });
}

TEST(Losses, WhatDoesNotFitTogetherIsRefusedByName) {
  const auto refused = [](const LossConfig& config, const char* words) {
    expect_error(ErrorCode::kInvalidArgument, words, [&] { check(config, 6); });
  };
  refused({.balance = std::nan("")}, "balance is nan");
  refused({.scope = LossScope::kSequence}, "sequence_length=0");
  refused({.sequence_length = 4}, "scope=batch and sequence_length=4");
  refused({.devices = 4}, "devices=4 of the losses do not divide 6 experts");
  refused({.devices = 2, .devices_per_token = 3}, "devices_per_token=3");
  expect_error(ErrorCode::kInvalidArgument, "7 tokens are no multiple of sequence_length=4",
               [] { (void)loss_groups({.scope = LossScope::kSequence, .sequence_length = 4}, 7); });
  LossCase c(6, 6, 2, Score::kSoftmax, {.scope = LossScope::kGlobal});
  c.global_counts.clear();
  expect_error(ErrorCode::kInvalidArgument, "scope global without global counts",
               [&] { (void)losses_on_cpu(c); });
  c.expert[3] = 6;
  expect_error(ErrorCode::kInvalidArgument, "expert[1, 1] is 6", [&] { (void)losses_on_cpu(c); });
}

TEST(Losses, EveryScopeAndShareHasAWord) {
  EXPECT_EQ(parse<LossScope>("sequence"), LossScope::kSequence);
  EXPECT_EQ(parse<BalanceShare>("first-choice"), BalanceShare::kFirstChoice);
}

TEST(ReluL1, IsReMoEsFormulaAndItsGradientThatOfDifferencesWithTheShareHeld) {
  constexpr std::int64_t kTokens = 300;  // more than one part
  constexpr std::int32_t kExperts = 5;
  std::mt19937 random(11);
  std::vector<float> logits;
  for (std::int64_t i = 0; i < kTokens * kExperts; ++i) {
    logits.push_back(static_cast<float>(static_cast<int>(random() % 33) - 16) / 8 + 0.0625F);
  }
  for (const std::int32_t top_k : {0, 2}) {
    std::vector<double> share(kExperts);
    std::vector<double> mean(kExperts);
    double active = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (!(logits[i] > 0)) continue;
      share[i % kExperts] += 1.0 / kTokens;
      mean[i % kExperts] += double{logits[i]} / kTokens;
      active += 1.0 / kTokens;
    }
    double want = 0;
    for (std::size_t e = 0; e < kExperts; ++e) {
      share[e] = top_k == 0 ? 1.0 / kExperts : share[e] / top_k;
      want += kExperts * share[e] * mean[e];
    }
    std::vector<float> dlogits(logits.size(), 1.0F);  // there is something already
    const ReluL1 found = relu_l1({.logits = {logits.data(), {kTokens, kExperts}},
                                  .top_k = top_k,
                                  .scale = 64,
                                  .dlogits = {dlogits.data(), {kTokens, kExperts}}});
    EXPECT_NEAR(found.value, want, 1e-12);
    EXPECT_NEAR(found.active, active, 1e-12);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double slope = logits[i] > 0 ? 64 * kExperts * share[i % kExperts] / kTokens : 0;
      EXPECT_NEAR(dlogits[i], 1 + slope, 1e-6) << i;
    }
    ThreadPool pool(3);
    const ReluL1 threads = relu_l1({.logits = {logits.data(), {kTokens, kExperts}},
                                    .top_k = top_k,
                                    .execution = {.pool = &pool}});
    EXPECT_EQ(threads.value, found.value);
  }
  EXPECT_DOUBLE_EQ(next_l1_coefficient(1e-8, 2.1, 2), 1.2e-8);
  EXPECT_DOUBLE_EQ(next_l1_coefficient(1e-8, 2.0, 2), 1e-8 / 1.2);
  expect_error(ErrorCode::kInvalidArgument, "top_k=6 of 5 experts", [&] {
    (void)relu_l1({.logits = {logits.data(), {kTokens, kExperts}}, .top_k = 6});
  });
}

}  // namespace
}  // namespace switchyard
