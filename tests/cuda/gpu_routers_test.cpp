// Routers other than top-k on a GPU against those of the CPU: experts and weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "reference/reference.hpp"
#include "reference/router_rules.hpp"
#include "testkit/expect_error.hpp"
#include "tests/cuda/routers/case.hpp"

namespace switchyard {
namespace {

using namespace test;
using reference::Bounded;

/// A sum of E floats in two orders, and two functions exp.
float tolerance_of(const RouterConfig& config) {
  return 1.2e-7F * static_cast<float>(8 + config.num_logits() / 4);
}

/// Whether a choice compares probabilities, whose last bits differ.
bool compares_probabilities(const RouterConfig& config) {
  return std::holds_alternative<TopPRouter>(config.kind) ||
         std::holds_alternative<ExpertChoiceRouter>(config.kind) ||
         std::holds_alternative<ExpertThresholdRouter>(config.kind);
}

/// That experts are the CPU's; where probabilities are compared all but a few tokens', which then
/// are right within the bounds of fp32.
void expect_cpu(const Call& call, std::int64_t most_apart) {
  const Result want = on_cpu(call);
  const Result have = on_gpu(call);
  EXPECT_TRUE(have.status.ok());
  const std::size_t columns = at(call.config.top_k());
  const float tolerance = tolerance_of(call.config);
  std::int64_t apart = 0;
  for (std::size_t t = 0; t < at(call.num_tokens); ++t) {
    const auto begin = static_cast<std::ptrdiff_t>(t * columns);
    const auto end = begin + static_cast<std::ptrdiff_t>(columns);
    if (!std::equal(want.expert.begin() + begin, want.expert.begin() + end,
                    have.expert.begin() + begin)) {
      ++apart;
      continue;
    }
    for (std::size_t i = t * columns; i < (t + 1) * columns; ++i) {
      ASSERT_NEAR(have.weight[i], want.weight[i], tolerance * std::abs(want.weight[i]) + 1e-30F)
          << "token " << t << " place " << i % columns;
    }
  }
  EXPECT_LE(apart, most_apart) << "tokens with other experts";
  if (apart == 0) return;
  std::vector<Bounded> logits;
  for (const float logit : call.logits) logits.push_back({double{logit}, 0});
  EXPECT_EQ(reference::check_rule(call.config, call.request, logits, have.expert, have.weight,
                                  call.selection_bias),
            "");
}

void expect_cpu(const Call& call) {
  expect_cpu(call, compares_probabilities(call.config) ? 1 + call.num_tokens / 200 : 0);
}

void expect_all(auto& routers, auto& sizes, const auto& change) {
  unsigned seed = 0;
  for (const char* router : routers) {
    for (const Size& size : sizes) {
      if (!goes_with(router, size)) continue;
      SCOPED_TRACE(testing::Message() << router << ", " << size.num_tokens << " tokens, "
                                      << size.top_k << " of " << size.num_experts);
      Call call(router, size, ++seed);
      change(call);
      expect_cpu(call);
    }
  }
}

constexpr auto kAsItIs = [](Call&) {};
constexpr auto kWithoutTraining = [](Call& call) { call.request.training = false; };

TEST(RoutersOnGpu, SmallRoutersOfLogitsChooseAsTheCpu) {
  expect_all(kOfLogits, kSmall, kAsItIs);
  expect_all(kOfLogits, kSmall, kWithoutTraining);
}

TEST(RoutersOnGpu, LargeRoutersOfLogitsChooseAsTheCpu) { expect_all(kOfLogits, kLarge, kAsItIs); }

TEST(RoutersOnGpu, LargeAdaMoeChoosesAsTheCpuWhereTokensShareAWarp) {
  for (const Size& size : {Size{4100, 128, 2}, Size{4097, 230, 1}, Size{4100, 30, 2},
                           Size{70, 256, 8}, Size{9, 373, 5}}) {
    SCOPED_TRACE(size.num_experts);
    expect_cpu(Call("adamoe:null-experts=8", size, 9));
  }
}

TEST(RoutersOnGpu, LargeCallsOfVariableRulesChooseAsTheCpu) {
  for (const char* router : {"top-p:threshold=0.6", "relu", "expert-threshold"}) {
    for (const Size& size : {Size{4100, 128, 2}, Size{1025, 256, 8}, Size{1025, 130, 3}}) {
      SCOPED_TRACE(testing::Message() << router << " " << size.num_experts);
      expect_cpu(Call(router, size, 9));
    }
  }
}

TEST(RoutersOnGpu, SmallRoutersWithoutLogitsChooseAsTheCpu) {
  expect_all(kPlaced, kSmall, kAsItIs);
}

TEST(RoutersOnGpu, LargeRoutersWithoutLogitsChooseAsTheCpu) {
  expect_all(kPlaced, kLarge, kAsItIs);
}

/// So many tokens an expert as a capacity factor gives it.
void expect_rerouted(const char* router, const Size& size, double factor, bool biased = false,
                     std::int32_t groups = 1, GroupScore group_score = GroupScore::kMax) {
  SCOPED_TRACE(testing::Message() << router << ", " << size.num_tokens << " tokens, " << size.top_k
                                  << " of " << size.num_experts << ", " << factor);
  Call call(router, size, 5);
  TopKRouter& rule = call.config.as_top_k();
  rule.groups = groups;
  rule.top_groups = (groups + 1) / 2;
  rule.group_score = group_score;
  call.room = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(factor * static_cast<double>(size.num_tokens * size.top_k) /
                                   size.num_experts));
  if (biased) call.selection_bias = random_floats(size.num_experts, 8, 0.1F);
  const Result want = on_cpu(call);
  const Result have = on_gpu(call);
  EXPECT_TRUE(have.status.ok());
  ASSERT_EQ(have.expert, want.expert);
  const float tolerance = tolerance_of(call.config);
  for (std::size_t i = 0; i < want.weight.size(); ++i) {
    ASSERT_NEAR(have.weight[i], want.weight[i], tolerance * std::abs(want.weight[i]) + 1e-30F) << i;
  }
}

TEST(RoutersOnGpu, SmallCallsWithRoomForFewTokensTakeWhatIsLeftAsTheCpu) {
  for (const Size& size : {Size{0, 8, 2}, Size{1, 1, 1}, Size{3, 8, 2}, Size{7, 5, 5},
                           Size{33, 40, 6}, Size{100, 8, 2}}) {
    for (const double factor : {0.5, 1.0, 1.5}) expect_rerouted("top-k", size, factor);
  }
  expect_rerouted("top-k", {60, 32, 4}, 1.0, false, 4);
}

TEST(RoutersOnGpu, LargeCallsWithRoomForFewTokensTakeWhatIsLeftAsTheCpu) {
  for (const Size& size : {Size{2050, 128, 4}, Size{4097, 8, 2}, Size{700, 512, 32},
                           Size{300, 1000, 8}, Size{1111, 37, 5}}) {
    for (const double factor : {0.3, 1.0, 1.25, 100.0}) {
      expect_rerouted("top-k", size, factor);
      expect_rerouted("top-k:score=sigmoid,renormalize=no,scale=2.5", size, factor);
      expect_rerouted("top-k:renormalize=no", size, factor);
    }
  }
  const Size groups{1500, 256, 8};
  expect_rerouted("top-k", groups, 1.0, false, 8);
  expect_rerouted("top-k:score=sigmoid", groups, 1.0, true, 8, GroupScore::kTop2Sum);
  expect_rerouted("top-k:score=sigmoid", groups, 1.0, true);
}

TEST(RoutersOnGpu, SmallNanWithRoomIsReportedAndTakesNone) {
  Call call("top-k", {40, 8, 2}, 5);
  call.room = 9;
  call.logits[at(7 * 8 + 3)] = kNan;
  const Result have = on_gpu(call);
  EXPECT_EQ(have.status.nan_logit, std::uint64_t{7} << 32 | 3U);
  EXPECT_EQ(have.expert[at(7 * 2)], -1);
  std::vector<int> counts(8);
  for (const std::int32_t e : have.expert) {
    if (e >= 0) ++counts[at(e)];
  }
  // 39 tokens' 78 choices fill 8 experts of 9 and go on among full ones.
  for (const int count : counts) EXPECT_GE(count, 9);
}

TEST(RoutersOnGpu, GShardNeedsTwoExpertsThereToo) {
  const Call call("relu", {3, 1, 1}, 1);
  Call other = call;
  other.config.kind = GShardRouter{};
  expect_error(ErrorCode::kInvalidArgument, "two experts", [&] { (void)on_gpu(other); });
}

TEST(RoutersOnGpu, SmallTiesGoToTheLowerExpert) {
  for (const char* router : kOfLogits) {
    SCOPED_TRACE(router);
    Call call(router, {40, 24, 3}, 5);
    for (float& logit : call.logits) logit = std::round(logit);
    // Of equal probabilities the sums' last bits decide, which are nobody's promise.
    expect_cpu(call, compares_probabilities(call.config) ? call.num_tokens : 0);
    for (float& logit : call.logits) logit = 0.25F;
    const bool on_border = std::holds_alternative<ExpertThresholdRouter>(call.config.kind) ||
                           std::holds_alternative<TopPRouter>(call.config.kind);
    expect_cpu(call, on_border ? call.num_tokens : 0);
  }
}

TEST(RoutersOnGpu, SmallGroupsOfEqualTokensTakeTheLowestOnes) {
  for (const std::int64_t group : {0, 1, 4, 300}) {
    for (const char* factor : {"0.3", "1", "2.5"}) {
      SCOPED_TRACE(testing::Message() << group << " " << factor);
      Call call("expert-choice:capacity-factor=" + std::string(factor), {600, 6, 2}, 3);
      std::get<ExpertChoiceRouter>(call.config.kind).group = group;
      // Few kinds of tokens, so that a column has many equals above and at its border.
      for (std::size_t i = 0; i < call.logits.size(); ++i) {
        const std::size_t token = i / 6;
        call.logits[i] = call.logits[token * 5 % 7 * 6 + i % 6];
      }
      expect_cpu(call, 0);
    }
  }
}

TEST(RoutersOnGpu, LargeGroupsAreChosenAmongWhetherRegistersHoldThemOrNot) {
  for (const std::int64_t tokens : {9000, 16384, 16385}) {
    SCOPED_TRACE(tokens);
    Call call("expert-choice", {tokens, 4, 1}, 3);
    expect_cpu(call);
    for (std::size_t i = 4; i < call.logits.size(); ++i) call.logits[i] = call.logits[i % 4];
    expect_cpu(call, 0);
  }
}

TEST(RoutersOnGpu, SmallLogitsThatAreInfiniteOrSaturateAreScores) {
  for (const char* router : kOfLogits) {
    SCOPED_TRACE(router);
    const bool by_order = !compares_probabilities(
        parse_router(router, {.num_experts = 12, .kind = TopKRouter{.top_k = 3}}));
    for (const float size : {60.0F, 300.0F, 1e20F}) expect_cpu(Call(router, {50, 12, 3}, 4, size));
    if (!by_order) continue;
    Call call(router, {50, 12, 3}, 4);
    for (std::size_t i = 0; i < call.logits.size(); i += 5) call.logits[i] = i % 2 ? kInf : -kInf;
    for (std::size_t i = 0; i < 12; ++i) call.logits[i] = -kInf;  // a whole token
    const bool weights_may_be_infinite = std::holds_alternative<ReluRouter>(call.config.kind);
    const Result want = on_cpu(call);
    const Result have = on_gpu(call);
    EXPECT_EQ(have.expert, want.expert);
    for (std::size_t i = 0; i < want.weight.size(); ++i) {
      if (weights_may_be_infinite) {
        ASSERT_EQ(have.weight[i], want.weight[i]) << i;
      } else {
        ASSERT_NEAR(have.weight[i], want.weight[i], 1e-6) << i;
      }
    }
  }
}

TEST(RoutersOnGpu, SmallNansLeaveTheLowestTokenAndExpertInTheStatusAndNoExpert) {
  for (const char* router : kOfLogits) {
    SCOPED_TRACE(router);
    Call call(router, {50, 40, 3}, 4);
    const Result whole = on_gpu(call);
    const std::size_t width = at(call.config.num_logits());
    call.logits[47 * width + 1] = kNan;
    call.logits[21 * width + 36] = kNan;
    call.logits[21 * width + 33] = -kNan;
    const Result have = on_gpu(call);
    EXPECT_EQ(have.status.nan_logit, std::uint64_t{21} << 32 | 33U);
    const std::size_t columns = at(call.config.top_k());
    const bool by_token = !std::holds_alternative<ExpertChoiceRouter>(call.config.kind);
    for (std::size_t i = 0; i < have.expert.size(); ++i) {
      const std::size_t token = i / columns;
      if (token == 21 || token == 47) {
        ASSERT_EQ(have.expert[i], -1) << i;
        ASSERT_EQ(have.weight[i], 0.0F) << i;
      } else if (by_token) {
        ASSERT_EQ(have.expert[i], whole.expert[i]) << i;
        ASSERT_EQ(have.weight[i], whole.weight[i]) << i;
      }
    }
  }
}

TEST(RoutersOnGpu, SmallThresholdsOfExpertsAreTheCallers) {
  for (const Size& size : {Size{30, 12, 1}, Size{300, 200, 1}}) {
    Call call("expert-threshold", size, 8);
    call.selection_bias = random_floats(size.num_experts, 9, 0.05F);
    expect_cpu(call);
  }
}

TEST(RoutersOnGpu, SmallHashTablesAreReadWhereTheyLieAndIdsBeyondThemAreNamed) {
  std::vector<std::int64_t> frequency;
  for (std::int64_t v = 0; v < 1000; ++v) frequency.push_back(100000 / (v + 1));
  Call call("hash", {300, 24, 3}, 2);
  std::get<HashRouter>(call.config.kind).table =
      std::make_shared<std::vector<std::int32_t>>(balanced_hash_table(frequency, 24, 3));
  expect_cpu(call);
  const Result whole = on_gpu(call);
  call.token_ids[250] = -1;
  call.token_ids[77] = 1000;
  const Result have = on_gpu(call);
  EXPECT_EQ(have.status.bad_token_id, std::uint64_t{77} << 32 | 1000U);
  for (std::size_t i = 0; i < have.expert.size(); ++i) {
    const bool bad = i / 3 == 77 || i / 3 == 250;
    ASSERT_EQ(have.expert[i], bad ? -1 : whole.expert[i]) << i;
    ASSERT_EQ(have.weight[i], bad ? 0.0F : whole.weight[i]) << i;
  }
  RouteArgs args = call.args();
  std::vector<std::int32_t> somewhere(at(call.places()));
  std::vector<float> weight(somewhere.size());
  args.request.token_ids = {call.token_ids.data(), {call.num_tokens}};
  args.routing = {.expert = {somewhere.data(), {300, 3}}, .weight = {weight.data(), {300, 3}}};
  args.execution.backend = Backend::kCuda;
  expect_error(ErrorCode::kUnsupported, "hash router's table is not on the GPU",
               [&] { route(args); });
}

TEST(RoutersOnGpu, WhatKernelsDoNotTakeIsRefusedByName) {
  expect_error(ErrorCode::kUnsupported, "num_experts exceeds 1024", [&] {
    (void)on_gpu(Call("zipf", {2, 1025, 1}, 1));
  });
  expect_error(ErrorCode::kUnsupported, "top_k exceeds 32", [&] {
    (void)on_gpu(Call("adamoe", {2, 64, 33}, 1));
  });
}

TEST(RoutersOnGpu, ThousandsOfExpertsAreNoLimitWhereNothingIsHeld) {
  for (const char* router : kOfLogits) {
    SCOPED_TRACE(router);
    expect_cpu(Call(router, {12, 3000, 20}, 1));
  }
  expect_cpu(Call("hash", {20, 3000, 40}, 1));
  expect_cpu(Call("uniform", {20, 3000, 40}, 1));
}

}  // namespace
}  // namespace switchyard
