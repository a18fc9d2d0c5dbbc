// Rerouting: tokens take the best experts that have room left, by the definition on random and
// nasty logits, and what does not go with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "switchyard/plan.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

using test::expect_error;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

struct Routed {
  std::vector<std::int32_t> expert;
  std::vector<float> weight;
};

Routed run(const RouterConfig& config, const std::vector<float>& logits, std::int64_t room,
           ThreadPool* pool = nullptr) {
  const std::int64_t tokens = std::ssize(logits) / config.num_experts;
  const std::int64_t top_k = config.top_k();
  Routed out{std::vector<std::int32_t>(at(tokens * top_k), -7),
             std::vector<float>(at(tokens * top_k), -7.0F)};
  route({.logits = {logits.data(), {tokens, config.num_experts}},
         .config = config,
         .routing = {.expert = {out.expert.data(), {tokens, top_k}},
                     .weight = {out.weight.data(), {tokens, top_k}}},
         .room = room,
         .execution = {.pool = pool}});
  return out;
}

RouterConfig top_k_of(std::int32_t experts, std::int32_t top_k) {
  return {.num_experts = experts, .kind = TopKRouter{.top_k = top_k}};
}

/// By sorting, in double: with room first, then by logit, then by id.
void expect_by_definition(const std::vector<float>& logits, std::int32_t experts,
                          std::int32_t top_k, std::int64_t room) {
  const Routed have = run(top_k_of(experts, top_k), logits, room);
  std::vector<std::int64_t> left(at(experts), room);
  for (std::int64_t t = 0; t < std::ssize(logits) / experts; ++t) {
    const float* const row = logits.data() + t * experts;
    std::vector<std::int32_t> order(at(experts));
    for (std::int32_t e = 0; e < experts; ++e) order[at(e)] = e;
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      const bool room_a = left[at(a)] > 0;
      const bool room_b = left[at(b)] > 0;
      return room_a != room_b ? room_a : row[a] > row[b];
    });
    double sum = 0;
    for (std::int32_t k = 0; k < top_k; ++k) sum += std::exp(double{row[order[at(k)]]});
    for (std::int32_t k = 0; k < top_k; ++k) {
      const std::int32_t e = order[at(k)];
      EXPECT_EQ(have.expert[at(t * top_k + k)], e) << "token " << t << ", choice " << k;
      EXPECT_NEAR(double{have.weight[at(t * top_k + k)]}, std::exp(double{row[e]}) / sum, 1e-6);
      if (left[at(e)] > 0) --left[at(e)];
    }
  }
}

TEST(Reroute, TokensTakeTheirBestExpertsOfThoseWithRoomWithTheWeightsOfThese) {
  for (const std::int32_t experts : {1, 2, 5, 16}) {
    for (const std::int32_t top_k : {1, 2, 5, 16}) {
      for (const std::int64_t room : {1, 3, 7, 1000}) {
        if (top_k > experts) continue;
        SCOPED_TRACE(testing::Message() << experts << ' ' << top_k << ' ' << room);
        expect_by_definition(random_floats(std::int64_t{23} * experts, 7), experts, top_k, room);
        expect_by_definition(std::vector<float>(at(std::int64_t{23} * experts), 0.5F), experts,
                             top_k, room);
        expect_by_definition({}, experts, top_k, room);
      }
    }
  }
}

TEST(Reroute, NothingIsDroppedWhereThereIsRoomForAllAndLastChoicesAreElsewhere) {
  constexpr std::int32_t kExperts = 8;
  constexpr std::int64_t kTokens = 64;
  for (const std::int32_t top_k : {1, 2}) {
    // All tokens want the first experts.
    std::vector<float> logits(at(kTokens * kExperts));
    for (std::size_t i = 0; i < logits.size(); ++i) {
      logits[i] = -static_cast<float>(i % kExperts);
    }
    const std::int64_t capacity = kTokens * top_k / kExperts;
    Routed routed = run(top_k_of(kExperts, top_k), logits, capacity);
    std::vector<std::uint8_t> kept(routed.expert.size());
    std::vector<std::int64_t> counts(kExperts);
    std::vector<std::int64_t> counts_kept(kExperts);
    apply_capacity(
        {.assignments = DenseAssignments{.expert = {routed.expert.data(), {kTokens, top_k}},
                                         .weight = {routed.weight.data(), {kTokens, top_k}}},
         .num_experts = kExperts,
         .capacity = capacity,
         .kept = {kept.data(), {std::ssize(kept)}},
         .counts = {counts.data(), {kExperts}},
         .counts_kept = {counts_kept.data(), {kExperts}}});
    EXPECT_EQ(counts, std::vector<std::int64_t>(kExperts, capacity));
    EXPECT_EQ(counts_kept, counts);
  }
}

TEST(Reroute, EnoughRoomAndAnyThreadsChangeNoBit) {
  const std::vector<float> logits = random_floats(std::int64_t{200} * 12, 3);
  for (const char* spelling : {"top-k", "top-k:renormalize=no", "top-k:score=sigmoid,scale=2.5",
                               "top-k:score=topk-softmax", "switch", "v-moe"}) {
    const RouterConfig config = parse_router(spelling, top_k_of(12, 3));
    const Routed want = run(config, logits, 0);
    const Routed have = run(config, logits, 200);
    EXPECT_EQ(have.expert, want.expert) << spelling;
    EXPECT_EQ(have.weight, want.weight) << spelling;
    ThreadPool pool(3);
    EXPECT_EQ(run(config, logits, 20).expert, run(config, logits, 20, &pool).expert) << spelling;
  }
}

TEST(Reroute, WhatDoesNotGoWithItIsNamed) {
  const auto bad = ErrorCode::kInvalidArgument;
  std::vector<float> logits = random_floats(std::int64_t{6} * 4, 3);
  expect_error(bad, "room=-1 of an expert", [&] { (void)run(top_k_of(4, 2), logits, -1); });
  for (const char* spelling : {"gshard", "adamoe:null-experts=1", "relu", "expert-choice"}) {
    const RouterConfig config = parse_router(spelling, top_k_of(4, 2));
    const std::vector<float> wide(at(std::int64_t{6} * config.num_logits()));
    const std::string words = std::string("reroute with the router ") +
                              std::string(spelling).substr(0, std::string(spelling).find(':'));
    std::vector<std::int32_t> expert(at(std::int64_t{6} * config.top_k()));
    std::vector<float> weight(expert.size());
    expect_error(bad, words, [&] {
      route({.logits = {wide.data(), {6, config.num_logits()}},
             .config = config,
             .routing = {.expert = {expert.data(), {6, config.top_k()}},
                         .weight = {weight.data(), {6, config.top_k()}}},
             .room = 2});
    });
  }
  expect_error(bad, "reroute with the score sparse-mixer", [&] {
    (void)run(parse_router("top-k:score=sparse-mixer", top_k_of(4, 2)), logits, 2);
  });
  logits[9] = std::numeric_limits<float>::quiet_NaN();
  expect_error(bad, "the logit of token 2 for expert 1 is NaN",
               [&] { (void)run(top_k_of(4, 2), logits, 2); });
  std::vector<std::uint8_t> kept(2);
  std::vector<std::int64_t> counts(4);
  const std::vector<std::int32_t> expert{0, 1};
  const std::vector<float> weight{1, 1};
  expect_error(bad, "policy=reroute: the router reroutes", [&] {
    apply_capacity({.assignments = DenseAssignments{.expert = {expert.data(), {2, 1}},
                                                    .weight = {weight.data(), {2, 1}}},
                    .num_experts = 4,
                    .capacity = 1,
                    .policy = DropPolicy::kReroute,
                    .kept = {kept.data(), {2}},
                    .counts = {counts.data(), {4}},
                    .counts_kept = {counts.data(), {4}}});
  });
}

}  // namespace
}  // namespace switchyard
