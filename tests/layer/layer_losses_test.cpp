// Auxiliary losses in a layer's configuration: their values, their gradient beside that which a
// caller adds himself, scales, counts of others, and bad input.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "layer/saved_forward.hpp"
#include "reference/losses.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"
#include "verify/problem.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using verify::Case;
using verify::Problem;

constexpr std::int64_t kTokens = 12;
constexpr std::int64_t kHidden = 11;
constexpr std::int32_t kExperts = 6;
constexpr std::int32_t kTopK = 2;

Problem make_layer() {
  Case test;
  test.seed = 5;
  test.layer.router = {.num_experts = kExperts, .kind = TopKRouter{.top_k = kTopK}};
  test.layer.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = 6};
  return make_problem(test);
}

const LossConfig kLosses{.balance = 0.5, .z = 0.25, .entropy = 0.125};

/// A layer's forward that saves, and the gradients behind it: dtokens, then dgate.
class Steps {
 public:
  Steps(const Problem& problem, const LayerOptions& options)
      : layer_(problem.model, options), tokens_(random_floats(kTokens * kHidden, 1)) {}

  void forward() {
    std::vector<float> out(tokens_.size());
    RoutingRecord record;
    layer_.forward({.tokens = matrix(tokens_, kTokens),
                    .out = matrix(out, kTokens),
                    .request = {.record = &record},
                    .saved = &saved});
    expert = record.expert;
    const Matrix<const float> found = saved.logits();
    logits.assign(found.data, found.data + found.size());
  }

  std::vector<float> backward(float scale = 1, const std::vector<float>& of_caller = {},
                              const std::vector<std::int64_t>& counts = {}) {
    std::vector<float> dout = random_floats(kTokens * kHidden, 2);
    for (float& x : dout) x *= scale;
    std::vector<float> dtokens(tokens_.size());
    std::vector<float> dgate(kExperts * kHidden);
    BackwardArgs args{.saved = &saved,
                      .dout = matrix(dout, kTokens),
                      .dtokens = matrix(dtokens, kTokens),
                      .dgate = matrix(dgate, kExperts)};
    args.loss_scale = double{scale};
    if (!of_caller.empty()) args.dlogits = {of_caller.data(), {kTokens, kExperts}};
    if (!counts.empty()) args.loss_counts = {counts.data(), {kExperts}};
    layer_.backward(args);
    dtokens.insert(dtokens.end(), dgate.begin(), dgate.end());
    return dtokens;
  }

  [[nodiscard]] LossValues values() const {
    LossValues result;
    std::copy_n(reinterpret_cast<const LossValues*>(saved.losses().data), 1, &result);
    return result;
  }
  [[nodiscard]] reference::RoutedTokens routed() const {
    reference::RoutedTokens result{.num_experts = kExperts,
                                   .logits = {logits.begin(), logits.end()}};
    const std::size_t columns = expert.size() / kTokens;
    for (std::size_t i = 0; i < expert.size(); ++i) {
      if (i % columns == 0) result.choices.emplace_back();
      if (expert[i] >= 0) result.choices.back().push_back(expert[i]);
    }
    return result;
  }

  SavedForward saved{};
  std::vector<float> logits{};
  std::vector<std::int32_t> expert{};

 private:
  static RawMatrix matrix(std::vector<float>& values, std::int64_t rows) {
    return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, rows, kHidden};
  }
  MoeLayer layer_;
  std::vector<float> tokens_;
};

/// By differences of the reference.
std::vector<float> gradient_of(reference::RoutedTokens routed, const LossConfig& config,
                               const std::vector<std::int64_t>& counts = {}) {
  std::vector<float> gradient;
  for (double& x : routed.logits) {
    const double at = x;
    x = at + 1e-5;
    const double above = reference::loss_values(routed, config, counts).total;
    x = at - 1e-5;
    const double below = reference::loss_values(routed, config, counts).total;
    x = at;
    gradient.push_back(static_cast<float>((above - below) / 2e-5));
  }
  return gradient;
}

void expect_same(const std::vector<float>& have, const std::vector<float>& want) {
  ASSERT_EQ(have.size(), want.size());
  for (std::size_t i = 0; i < have.size(); ++i) EXPECT_NEAR(have[i], want[i], 2e-5) << i;
}

/// The values are the reference's, and gradients those of a caller who adds the losses.
void expect_losses(const Problem& problem, const LossConfig& config) {
  Steps with(problem, {.losses = config});
  Steps without(problem, {});
  with.forward();
  without.forward();
  const LossValues want = reference::loss_values(with.routed(), config);
  EXPECT_NEAR(with.values().balance, want.balance, 1e-6);
  EXPECT_NEAR(with.values().total, want.total, 1e-6);
  EXPECT_EQ(without.saved.losses().data, nullptr);
  const std::vector<float> by_hand = without.backward(1, gradient_of(with.routed(), config));
  expect_same(with.backward(), by_hand);
  without.forward();
  const std::vector<float> none = without.backward();
  EXPECT_GT(std::abs(none.back() - by_hand.back()), 1e-4);  // there is something to be seen
}

TEST(LayerLosses, ValuesAreTheReferencesAndGradientsThoseOfACallerWhoAddsThem) {
  const Problem problem = make_layer();
  expect_losses(problem, kLosses);
  expect_losses(problem, {.balance = 2,
                          .device = 1,
                          .scope = LossScope::kSequence,
                          .sequence_length = 4,
                          .devices = 3});
}

TEST(LayerLosses, GoBackThroughEveryRouterOfLogits) {
  for (const char* spelling :
       {"switch", "gshard", "v-moe", "top-p:threshold=0.6", "relu", "expert-choice:group=4"}) {
    SCOPED_TRACE(spelling);
    Problem problem = make_layer();
    use_router(problem.model, parse_router(spelling, problem.model.config.router));
    LossConfig config = kLosses;
    config.importance = 0.5;
    expect_losses(problem, config);
  }
}

/// Of each rank the gradients of its tokens, then of the gate, with losses by the counts of all.
/// @param counts  Of each rank what it gives; empty: it gives none.
std::vector<std::vector<float>> over_ranks(const Problem& problem, const LossConfig& config,
                                           const std::vector<std::vector<std::int64_t>>& counts,
                                           std::int64_t tokens_of_first = kTokens) {
  std::vector<std::vector<float>> found(counts.size());
  run_ranks(static_cast<int>(counts.size()), [&](Communicator& ranks) {
    const auto rank = static_cast<std::size_t>(ranks.rank());
    const std::int64_t num_tokens = rank == 0 ? tokens_of_first : 5;
    MoeLayer layer(problem.model, {.max_tokens = tokens_of_first, .losses = config}, &ranks);
    std::vector<float> tokens =
        random_floats(num_tokens * kHidden, 10 + static_cast<unsigned>(rank));
    std::vector<float> out(tokens.size());
    std::vector<float> dtokens(tokens.size());
    std::vector<float> dgate(kExperts * kHidden);
    const auto matrix = [](std::vector<float>& values) {
      return RawMatrix{reinterpret_cast<std::byte*>(values.data()), DType::kF32,
                       std::ssize(values) / kHidden, kHidden};
    };
    SavedForward saved;
    layer.forward({.tokens = matrix(tokens), .out = matrix(out), .saved = &saved});
    BackwardArgs args{.saved = &saved,
                      .dout = matrix(tokens),
                      .dtokens = matrix(dtokens),
                      .dgate = matrix(dgate)};
    if (!counts[rank].empty()) args.loss_counts = {counts[rank].data(), {kExperts}};
    layer.backward(args);
    dtokens.insert(dtokens.end(), dgate.begin(), dgate.end());
    const Matrix<const std::int64_t> own = saved.counts();
    dtokens.insert(dtokens.end(), own.data, own.data + own.size());
    found[rank] = dtokens;
  });
  return found;
}

TEST(LayerLosses, GlobalOnesOverRanksGoByTheCountsOfAllOfThem) {
  const Problem problem = make_layer();
  const LossConfig config{.balance = 4, .scope = LossScope::kGlobal};
  for (const std::size_t ranks : {2U, 4U}) {
    const auto none = std::vector<std::vector<std::int64_t>>(ranks);
    const auto found = over_ranks(problem, config, none);
    std::vector<std::int64_t> all(kExperts);
    for (const std::vector<float>& of_rank : found) {
      for (std::size_t e = 0; e < kExperts; ++e) {
        all[e] += static_cast<std::int64_t>(of_rank[of_rank.size() - kExperts + e]);
      }
    }
    EXPECT_EQ(std::accumulate(all.begin(), all.end(), std::int64_t{0}),
              kTopK * (kTokens + 5 * (static_cast<std::int64_t>(ranks) - 1)));
    EXPECT_EQ(found, over_ranks(problem, config, {ranks, all}));
    EXPECT_NE(found, over_ranks(problem, {.balance = 4}, none));
    auto some = none;
    some[0] = all;
    expect_error(ErrorCode::kCommunication, "ask for gradients of different parameters",
                 [&] { (void)over_ranks(problem, config, some); });
  }
}

TEST(LayerLosses, CountsOverRanksMayBeLargerThanHalfOfTheirBits) {
  Problem problem = make_layer();
  problem.model.router_bias = std::vector<float>{8, 8, 0, 0, 0, 0};  // all choose the first two
  const LossConfig config{.balance = 4, .scope = LossScope::kGlobal};
  constexpr std::int64_t kMany = 66000;
  const auto found = over_ranks(problem, config, {{}, {}}, kMany);
  std::vector<std::int64_t> all(kExperts);
  for (const std::vector<float>& of_rank : found) {
    for (std::size_t e = 0; e < kExperts; ++e) {
      all[e] += static_cast<std::int64_t>(of_rank[of_rank.size() - kExperts + e]);
    }
  }
  EXPECT_GT(*std::max_element(all.begin(), all.end()), 1 << 16);
  EXPECT_TRUE(found == over_ranks(problem, config, {all, all}, kMany));
}

TEST(LayerLosses, TheirGradientIsScaledAsThatOfTheMainLoss) {
  const Problem problem = make_layer();
  Steps run(problem, {.losses = kLosses});
  run.forward();
  std::vector<float> want = run.backward();
  for (float& x : want) x *= 64;
  run.forward();
  EXPECT_EQ(run.backward(64), want);
}

TEST(LayerLosses, GlobalOnesGoByTheCountsThatTheBackwardIsGiven) {
  const Problem problem = make_layer();
  const LossConfig config{.balance = 2, .scope = LossScope::kGlobal};
  Steps with(problem, {.losses = config});
  Steps without(problem, {});
  with.forward();
  without.forward();
  const Matrix<const std::int64_t> own = with.saved.counts();
  ASSERT_EQ(own.size(), kExperts);
  std::vector<std::int64_t> counts = {7, 0, 30, 1, 2, 5};  // of another rank
  for (std::size_t e = 0; e < counts.size(); ++e) counts[e] += own.data[e];
  expect_same(with.backward(1, {}, counts),
              without.backward(1, gradient_of(with.routed(), config, counts)));
  with.forward();
  expect_error(ErrorCode::kInvalidArgument, "loss_counts", [&] { (void)with.backward(); });
  Steps batch(problem, {.losses = kLosses});
  batch.forward();
  expect_error(ErrorCode::kInvalidArgument, "loss_counts",
               [&] { (void)batch.backward(1, {}, counts); });
}

/// Where an odd number of 8-byte values stood before them they began at a multiple of 8, and a
/// layer on a GPU, which reads 16 bytes at a time, refused its own backward.
TEST(LayerLosses, PricesLieAtMultiplesOf16BytesForAnyNumbersOfExpertsDevicesAndGroups) {
  std::vector<float> tokens = random_floats(kTokens * kHidden, 1), out(tokens.size());
  const auto rows = [](std::vector<float>& values) -> RawMatrix {
    return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, kTokens, kHidden};
  };
  const auto place_in = [](const void* data, std::uintptr_t size) {
    return reinterpret_cast<std::uintptr_t>(data) % size;
  };
  const auto check = [&](std::int32_t experts, std::int32_t devices, std::int64_t length) {
    SCOPED_TRACE(testing::Message() << experts << " experts, " << devices << " devices, "
                                    << kTokens / length << " groups");
    Case test;
    test.layer.router = {.num_experts = experts, .kind = TopKRouter{.top_k = kTopK}};
    test.layer.experts = {.num_experts = experts, .hidden = kHidden, .inner = 6};
    const Problem problem = make_problem(test);
    LossConfig config = {.balance = 1, .device = 1};
    config.scope = LossScope::kSequence;
    config.sequence_length = length;
    config.devices = devices;
    MoeLayer layer(problem.model, {.losses = config});
    SavedForward saved;
    layer.forward({.tokens = rows(tokens), .out = rows(out), .saved = &saved});
    const SavedForward::State::Losses& losses = saved.state().losses;
    ASSERT_EQ(losses.score_prices.shape[0], kTokens / length);
    EXPECT_EQ(place_in(losses.score_prices.data, 16), 0U);
    EXPECT_EQ(place_in(losses.values.data, alignof(double)), 0U);
    // Behind the values, by less than what is counted for it.
    const auto* const end = reinterpret_cast<const std::byte*>(losses.values.data + kLossValues);
    const auto* const prices = reinterpret_cast<const std::byte*>(losses.score_prices.data);
    EXPECT_GE(prices, end);
    EXPECT_LT(prices - end, 16);
  };
  for (const std::int32_t experts : {3, 4, 5, 6, 7, 8, 9, 35}) {
    for (const std::int64_t length : {1, 4, 12}) {
      check(experts, 1, length);
      check(experts, experts, length);
    }
  }
}

TEST(LayerLosses, WhatDoesNotFitIsRefusedByName) {
  const Problem problem = make_layer();
  expect_error(ErrorCode::kInvalidArgument, "devices=4 of the losses do not divide 6 experts",
               [&] { const Steps run(problem, {.losses = {.device = 1, .devices = 4}}); });
  Problem hash = problem;
  hash.model.config.router.kind = HashRouter{.top_k = kTopK};
  expect_error(ErrorCode::kUnsupported, "the router hash has none",
               [&] { const Steps run(hash, {.losses = {.z = 1}}); });
  Steps run(problem,
            {.losses = {.balance = 1, .scope = LossScope::kSequence, .sequence_length = 5}});
  expect_error(ErrorCode::kInvalidArgument, "12 tokens are no multiple of sequence_length=5",
               [&] { run.forward(); });
}

}  // namespace
}  // namespace switchyard
