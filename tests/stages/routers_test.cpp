// What the rules of routers promise beside their numbers (tests/stages/routers_golden_test.cpp):
// the properties that their table states, whatever the threads and ranks, and bad input.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/backward.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

/// An error whose message has all of these words.
void expect_error(ErrorCode code, const std::vector<std::string>& words, const auto& call) {
  for (const std::string& word : words) test::expect_error(code, word, call);
}

constexpr std::int32_t kExperts = 8;

RouterConfig spelled(std::string_view spelling, std::int32_t num_experts = kExperts) {
  return parse_router(spelling, {.num_experts = num_experts, .kind = TopKRouter{.top_k = 2}});
}

/// Tokens with their logits and ids, and what routing makes of some of them.
struct Input {
  std::vector<float> logits;
  std::vector<std::int32_t> ids;
  std::int64_t num_tokens;

  explicit Input(std::int64_t count, unsigned seed = 3) : num_tokens(count) {
    std::mt19937 random(seed);
    logits = random_floats(count * kExperts, random);
    for (std::int64_t t = 0; t < count; ++t) {
      ids.push_back(static_cast<std::int32_t>(random() % 50000));
    }
  }

  struct Outcome {
    std::vector<std::int32_t> expert;
    std::vector<float> weight;
    bool operator==(const Outcome&) const = default;
  };

  /// Tokens [begin, end) as a rank of their own.
  [[nodiscard]] Outcome route(const RouterConfig& config, std::int64_t begin, std::int64_t end,
                              ThreadPool* pool = nullptr, std::uint64_t step = 1) const {
    const std::int64_t count = end - begin;
    const std::int64_t top_k = config.top_k();
    Outcome out{std::vector<std::int32_t>(static_cast<std::size_t>(count * top_k), -7),
                std::vector<float>(static_cast<std::size_t>(count * top_k), -7.0F)};
    RouteRequest request{.token_ids = {ids.data() + begin, {count}},
                         .seed = 11,
                         .step = step,
                         .layer = 2,
                         .first_token = begin,
                         .training = true};
    std::vector<float> noisy(logits.begin() + begin * kExperts, logits.begin() + end * kExperts);
    if (config.noise.is_on_logits()) {
      add_noise({.logits = {noisy.data(), {count, kExperts}},
                 .noise_logits = {logits.data() + begin * kExperts, {count, kExperts}},
                 .noise = config.noise,
                 .request = request,
                 .execution = {.pool = pool}});
    }
    std::vector<float> wide;  // null experts have the logits of experts again, from the last on
    for (std::int64_t i = 0; i < count * config.num_logits(); ++i) {
      const std::int64_t e = i % config.num_logits();
      const std::int64_t from = e < kExperts ? e : kExperts - 1 - e % kExperts;
      wide.push_back(noisy[static_cast<std::size_t>(i / config.num_logits() * kExperts + from)]);
    }
    Matrix<const float> view{};
    if (config.has_logits()) view = {wide.data(), {count, config.num_logits()}};
    switchyard::route({.logits = view,
                       .config = config,
                       .routing = {.expert = {out.expert.data(), {count, top_k}},
                                   .weight = {out.weight.data(), {count, top_k}}},
                       .request = request,
                       .execution = {.pool = pool}});
    return out;
  }
  [[nodiscard]] Outcome route(const RouterConfig& config) const {
    return route(config, 0, num_tokens);
  }
};

template <typename T>
std::vector<T> front(const std::vector<T>& values, std::int64_t count) {
  return {values.begin(), values.begin() + count};
}

/// Loads that are exact over a call are not those of a part of it.
bool has_exact_loads(const RouterKind& kind) {
  const std::string_view name = kind.name;
  return name == "zipf" || name == "hot" || name == "dirichlet";
}

std::vector<std::int64_t> counts_of(const std::vector<std::int32_t>& expert) {
  std::vector<std::int64_t> counts(kExperts);
  for (const std::int32_t e : expert) {
    if (e >= 0) ++counts[static_cast<std::size_t>(e)];
  }
  return counts;
}

TEST(Routers, ATokenHasDifferentExpertsThenUnusedPlacesWithoutWeight) {
  const Input input(37);
  for (const RouterKind& kind : router_kinds()) {
    SCOPED_TRACE(kind.name);
    const RouterConfig config = spelled(kind.name);
    EXPECT_EQ(config.is_variable(), kind.variable);
    EXPECT_EQ(config.has_logits(), kind.trainable);
    const auto [expert, weight] = input.route(config);
    const std::int64_t top_k = config.top_k();
    for (std::int64_t t = 0; t < input.num_tokens; ++t) {
      std::set<std::int32_t> seen;
      bool used = true;
      for (std::int64_t k = 0; k < top_k; ++k) {
        const auto i = static_cast<std::size_t>(t * top_k + k);
        ASSERT_TRUE(expert[i] >= -1 && expert[i] < config.num_experts);
        ASSERT_TRUE(used || expert[i] == -1) << "a place is used behind one that is not";
        used = expert[i] >= 0;
        ASSERT_TRUE(used ? seen.insert(expert[i]).second : weight[i] == 0.0F);
      }
    }
  }
}

TEST(Routers, EqualScoresGoToTheLowerExpertAndToTheLowerToken) {
  Input input(8);
  std::fill(input.logits.begin(), input.logits.end(), 1.5F);
  const auto experts = [&](const char* name, std::int64_t token) {
    const RouterConfig config = spelled(name);
    const auto all = input.route(config).expert;
    std::vector<std::int32_t> used(all.begin() + token * config.top_k(),
                                   all.begin() + (token + 1) * config.top_k());
    std::erase(used, -1);
    return used;
  };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(experts("switch", 5), (Ids{0}));
  EXPECT_EQ(experts("gshard:second=all", 5), (Ids{0, 1}));
  EXPECT_EQ(experts("top-p:threshold=0.5", 5), (Ids{0, 1, 2, 3, 4}));  // 4 sum to 0.5: not above
  for (std::int64_t token = 0; token < 8; ++token) {                   // C = 8 * 2 / 8
    EXPECT_EQ(experts("expert-choice", token).size(), token < 2 ? 8U : 0U);
    EXPECT_EQ(experts("expert-choice:group=4", token).size(), token % 4 == 0 ? 8U : 0U);
  }
}

TEST(Routers, TheBitsDependOnNoThreadAndOnNoStepOfOthers) {
  const Input input(101);
  ThreadPool three(3);
  for (const RouterKind& kind : router_kinds()) {
    SCOPED_TRACE(kind.name);
    const RouterConfig config = spelled(kind.name);
    EXPECT_EQ(input.route(config, 0, 101, &three), input.route(config));
  }
  EXPECT_NE(input.route(spelled("uniform"), 0, 101, nullptr, 2), input.route(spelled("uniform")));
  for (const char* noisy : {"v-moe:noise=1", "noisy-top-k"})
    EXPECT_NE(input.route(spelled(noisy), 0, 101, nullptr, 2), input.route(spelled(noisy)));
}

TEST(Routers, ACausalRulesPrefixDoesNotDependOnWhatFollows) {
  constexpr std::int64_t kPrefix = 20;
  const Input input(40);
  for (const RouterKind& kind : router_kinds()) {
    SCOPED_TRACE(kind.name);
    if (has_exact_loads(kind)) continue;  // for benchmarks: of the call as a whole
    const RouterConfig config = spelled(kind.name);
    const auto whole = front(input.route(config).expert, kPrefix * config.top_k());
    EXPECT_EQ(whole == input.route(config, 0, kPrefix).expert, kind.causal);
  }
}

TEST(Routers, TokensSplitOverRanksRouteAsOnOne) {
  const Input input(40);
  for (const RouterKind& kind : router_kinds()) {
    SCOPED_TRACE(kind.name);
    if (has_exact_loads(kind) || !kind.causal) continue;
    const RouterConfig config = spelled(kind.name);
    auto parts = input.route(config, 0, 13);
    const auto rest = input.route(config, 13, 40);
    parts.expert.insert(parts.expert.end(), rest.expert.begin(), rest.expert.end());
    parts.weight.insert(parts.weight.end(), rest.weight.begin(), rest.weight.end());
    EXPECT_EQ(parts, input.route(config));
  }
}

TEST(Routers, PermutedExpertsPermuteTheChoiceOfRulesOfLogits) {
  const Input input(30);
  Input permuted = input;
  for (std::int64_t t = 0; t < 30; ++t) {
    std::reverse(permuted.logits.begin() + t * kExperts,
                 permuted.logits.begin() + (t + 1) * kExperts);
  }
  for (const char* name :
       {"top-k", "switch", "gshard:second=threshold", "expert-choice", "top-p", "relu"}) {
    SCOPED_TRACE(name);
    const RouterConfig config = spelled(name);
    const auto pairs = [&](const Input::Outcome& outcome, bool back) {
      std::set<std::pair<std::int64_t, std::int32_t>> all;
      for (std::size_t i = 0; i < outcome.expert.size(); ++i) {
        const std::int32_t e = outcome.expert[i];
        if (e < 0) continue;
        all.emplace(static_cast<std::int64_t>(i) / config.top_k(), back ? kExperts - 1 - e : e);
      }
      return all;
    };
    EXPECT_EQ(pairs(input.route(config), false), pairs(permuted.route(config), true));
  }
}

TEST(Routers, EveryTrainableRuleHasAGradientAndNoOtherHasOne) {
  const Input input(12);
  for (const RouterKind& kind : router_kinds()) {
    SCOPED_TRACE(kind.name);
    const bool adamoe = std::string_view(kind.name) == "adamoe";  // one expert has the weight 1
    const RouterConfig config = spelled(adamoe ? "adamoe:null-experts=1" : kind.name);
    const auto [expert, weight] = input.route(config);
    std::mt19937 random(4);
    const auto dweight = random_floats(std::ssize(expert), random);
    const std::int64_t columns = config.num_logits();
    const auto logits = random_floats(12 * columns, random);
    std::vector<float> dlogits(logits.size());
    const RouteBackwardArgs args{.logits = {logits.data(), {12, columns}},
                                 .expert = {expert.data(), {12, config.top_k()}},
                                 .dweight = {dweight.data(), {12, config.top_k()}},
                                 .config = config,
                                 .dlogits = {dlogits.data(), {12, columns}}};
    if (!kind.trainable) {
      expect_error(ErrorCode::kInvalidArgument, {kind.name, "no way back"},
                   [&] { route_backward(args); });
      continue;
    }
    route_backward(args);
    const double sum = std::accumulate(dlogits.begin(), dlogits.end(), 0.0,
                                       [](double s, float x) { return s + std::abs(x); });
    EXPECT_GT(sum, 0.1);
  }
}

TEST(Routers, LossesAddTheSameToTheLogitsOfEveryRule) {
  const Input input(12);
  const std::vector<float> price = random_floats(2 * kExperts, 8);
  const LossPrices losses{.score = {price.data(), {2, kExperts}}, .z = 0.25F, .entropy = 0.125F};
  std::vector<float> first;
  for (const RouterKind& kind : router_kinds()) {
    if (!kind.trainable) continue;
    SCOPED_TRACE(kind.name);
    const RouterConfig config = spelled(kind.name);
    if (config.num_logits() != kExperts) continue;  // prices are of as many
    const auto [expert, weight] = input.route(config);
    const std::vector<float> nothing(expert.size());  // what is left is of the losses
    std::vector<float> dlogits(static_cast<std::size_t>(12 * kExperts));
    route_backward({.logits = {input.logits.data(), {12, kExperts}},
                    .expert = {expert.data(), {12, config.top_k()}},
                    .dweight = {nothing.data(), {12, config.top_k()}},
                    .config = config,
                    .losses = losses,
                    .dlogits = {dlogits.data(), {12, kExperts}}});
    if (first.empty()) first = dlogits;
    for (std::size_t i = 0; i < first.size(); ++i) EXPECT_FLOAT_EQ(dlogits[i], first[i]) << i;
  }
  EXPECT_GT(*std::max_element(first.begin(), first.end()), 0.01F);
}

TEST(Routers, ForcedLoadsAreExactlyWhatWasAskedFor) {
  const Input input(96);
  const auto counts = [&](const char* name) {
    return counts_of(input.route(spelled(name)).expert);
  };
  using Counts = std::vector<std::int64_t>;
  EXPECT_EQ(counts("round-robin:top-k=3"), Counts(kExperts, 36));
  // 192 assignments: 96 for the first, the most that one can have, and (192 - 96) / 7 of the
  // others.
  EXPECT_EQ(counts("hot:share=0.5"), (Counts{96, 14, 14, 14, 14, 14, 13, 13}));
  EXPECT_EQ(counts("hot:share=0.9"), counts("hot:share=0.5"));
  EXPECT_EQ(counts("hot:share=0.125,top-k=1"), Counts(kExperts, 12));
  EXPECT_EQ(counts("zipf:s=0"), Counts(kExperts, 24));
  const Counts zipf = counts("zipf:s=1,top-k=1");
  EXPECT_EQ(zipf, (Counts{35, 18, 12, 9, 7, 6, 5, 4}));  // of 96 / (1 + 1/2 + ... + 1/8) = 35.3
  const Counts dirichlet = counts("dirichlet:concentration=0.5");
  EXPECT_EQ(std::accumulate(dirichlet.begin(), dirichlet.end(), std::int64_t{0}), 192);
  EXPECT_GT(*std::max_element(dirichlet.begin(), dirichlet.end()),
            2 * *std::min_element(dirichlet.begin(), dirichlet.end()));
}

TEST(Routers, UniformRoutingDropsWhatTheClosedFormSays) {
  // drop = (sigma / n) (phi(z) - z (1 - Phi(z))), n = T K / E, sigma^2 = n (1 - 1/E),
  // z = n (factor - 1) / sigma: 1.75% for 64 experts of one choice, 32768 tokens and a factor of 1.
  constexpr std::int64_t kTokens = 32768;
  const RouterConfig config = spelled("uniform:top-k=1", 64);
  std::vector<std::int32_t> expert(kTokens);
  std::vector<float> weight(kTokens);
  double dropped = 0;
  for (std::uint64_t step = 0; step < 4; ++step) {
    route({.config = config,
           .routing = {.expert = {expert.data(), {kTokens, 1}},
                       .weight = {weight.data(), {kTokens, 1}}},
           .request = {.step = step}});
    std::vector<std::int64_t> counts(64);
    for (const std::int32_t e : expert) ++counts[static_cast<std::size_t>(e)];
    for (const std::int64_t n : counts)
      dropped += static_cast<double>(std::max<std::int64_t>(0, n - 512));
  }
  EXPECT_NEAR(dropped / (4 * kTokens), 0.0175, 0.002);
}

TEST(Routers, ABalancedTableSpreadsFrequenciesAndIsUsed) {
  // The oracle of the specification: most frequent first, to the least load, the lower id first.
  EXPECT_EQ(balanced_hash_table({50, 20, 10, 8, 6, 4, 1, 1}, 4, 1),
            (std::vector<std::int32_t>{0, 1, 2, 3, 3, 2, 2, 3}));
  const auto table = balanced_hash_table({9, 7, 5, 3}, 4, 2);
  EXPECT_EQ(table, (std::vector<std::int32_t>{0, 1, 2, 3, 2, 3, 0, 1}));
  RouterConfig config = spelled("hash:top-k=2", 4);
  std::get<HashRouter>(config.kind).table =
      std::make_shared<const std::vector<std::int32_t>>(table);
  const std::vector<std::int32_t> ids{3, 1, 2};
  std::vector<std::int32_t> expert(6);
  std::vector<float> weight(6);
  const RouteArgs args{
      .config = config,
      .routing = {.expert = {expert.data(), {3, 2}}, .weight = {weight.data(), {3, 2}}},
      .request = {.token_ids = {ids.data(), {3}}}};
  route(args);
  EXPECT_EQ(expert, (std::vector<std::int32_t>{0, 1, 2, 3, 2, 3}));
  const std::vector<std::int32_t> beyond{3, 4, 0};
  RouteArgs bad = args;
  bad.request.token_ids = {beyond.data(), {3}};
  expect_error(ErrorCode::kInvalidArgument, {"token_ids[1] is 4", "0 to 3"}, [&] { route(bad); });
  expect_error(ErrorCode::kInvalidArgument, {"frequency[1]=-1"}, [] {
    (void)balanced_hash_table({1, -1}, 2, 1);
  });
}

TEST(Routers, EdgesNoTokenOneTokenAllExpertsAndEmptyOnes) {
  for (const RouterKind& kind : router_kinds()) {
    SCOPED_TRACE(kind.name);
    for (const std::int64_t tokens : {0, 1, 3}) {
      EXPECT_NO_THROW((void)Input(tokens).route(spelled(kind.name))) << tokens;
    }
  }
  EXPECT_EQ(counts_of(Input(1).route(spelled("expert-choice")).expert),
            std::vector<std::int64_t>(kExperts, 1));  // C is at least 1
  EXPECT_EQ(counts_of(Input(2).route(spelled("uniform:top-k=8")).expert),
            std::vector<std::int64_t>(kExperts, 2));
}

TEST(Routers, WhatACallLacksIsNamed) {
  const Input input(10);
  expect_error(ErrorCode::kInvalidArgument, {"group=4", "10 tokens"},
               [&] { (void)input.route(spelled("expert-choice:group=4")); });
  std::vector<std::int32_t> expert(20);
  std::vector<float> weight(20);
  RouteArgs args{
      .config = spelled("hash"),
      .routing = {.expert = {expert.data(), {10, 2}}, .weight = {weight.data(), {10, 2}}}};
  expect_error(ErrorCode::kInvalidArgument, {"router hash", "token_ids"}, [&] { route(args); });
  args.logits = {input.logits.data(), {10, kExperts}};
  expect_error(ErrorCode::kInvalidArgument, {"router hash", "logits"}, [&] { route(args); });
  args.config = spelled("gshard");
  args.selection_bias = {input.logits.data(), {kExperts}};
  expect_error(ErrorCode::kInvalidArgument, {"selection bias", "gshard"}, [&] { route(args); });
  args.selection_bias = {};
  args.request.top_score = {weight.data(), {10}};
  expect_error(ErrorCode::kInvalidArgument, {"top_score", "gshard"}, [&] { route(args); });
  RouterConfig noisy = spelled("hash");
  noisy.noise = {RouterNoise::Kind::kLogits, 1.0F};
  expect_error(ErrorCode::kInvalidArgument, {"noise", "hash"}, [&] { check(noisy); });
}

TEST(Routers, ANanIsNamedByItsLowestTokenAndExpert) {
  for (const char* name : {"gshard", "top-p", "relu", "expert-choice", "switch", "noisy-top-k",
                           "adamoe", "expert-threshold"}) {
    SCOPED_TRACE(name);
    Input input(40);
    for (const std::size_t place : {std::size_t{35 * kExperts + 1}, std::size_t{17 * kExperts + 3},
                                    std::size_t{17 * kExperts + 5}}) {
      input.logits[place] = std::numeric_limits<float>::quiet_NaN();
    }
    expect_error(ErrorCode::kInvalidArgument, {"token 17 for expert 3 is NaN"},
                 [&] { (void)input.route(spelled(name)); });
  }
}

}  // namespace
}  // namespace switchyard
