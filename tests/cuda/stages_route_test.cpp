// Router GEMM and route on a GPU against the CPU and against double.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "route/gpu/groups.hpp"
#include "switchyard/route.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/stage_support.hpp"

namespace switchyard {
namespace {

struct RouteCase {
  std::int64_t num_tokens;
  RouterConfig config;
  bool bias = false;
  bool ties = false;
  bool top_score = true;
};

std::vector<RouteCase> route_cases() {
  std::vector<RouteCase> cases;
  for (const Score score : {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid}) {
    for (const bool renormalize : {false, true}) {
      for (const auto& [tokens, experts, top_k] : {std::array<std::int32_t, 3>{1, 1, 1},
                                                   {3, 8, 2},
                                                   {40, 60, 6},
                                                   {999, 128, 2},
                                                   {4100, 128, 2},  // a quarter of a warp a token
                                                   {4096, 100, 2},
                                                   {4097, 128, 8},
                                                   {70, 256, 8},
                                                   {33, 160, 6},
                                                   {20, 384, 8},
                                                   {9, 1024, 32},
                                                   {50, 32, 32},
                                                   {5, 33, 1}}) {
        cases.push_back(
            {.num_tokens = tokens,
             .config = {
                 .num_experts = experts,
                 .kind = TopKRouter{
                     .top_k = top_k, .score = score, .renormalize = renormalize, .scale = 2.5F}}});
        cases.back().ties = true;
        cases.push_back(cases.back());
        cases.back().ties = false;
        cases.back().bias = true;
      }
      for (const GroupScore group : {GroupScore::kMax, GroupScore::kTop2Sum}) {
        for (const auto& [experts, top_k, groups, top_groups] :
             {std::array<std::int32_t, 4>{256, 8, 8, 4},
              {160, 6, 8, 3},
              {64, 4, 16, 5},
              {48, 3, 48, 7},
              {12, 2, 3, 1},
              {512, 8, 4, 2},
              {96, 5, 32, 5}}) {
          for (const bool bias : {false, true}) {
            cases.push_back({.num_tokens = 77,
                             .config = {.num_experts = experts,
                                        .kind = TopKRouter{.top_k = top_k,
                                                           .score = score,
                                                           .renormalize = renormalize,
                                                           .groups = groups,
                                                           .top_groups = top_groups,
                                                           .group_score = group}},
                             .bias = bias});
          }
        }
      }
    }
  }
  // 8 of 256 experts by sigmoid from at most 4 of 8 groups have a kernel of their own.
  for (const std::int64_t tokens : {1, 15, 16, 17, 500, 4099}) {
    for (const std::int32_t top_groups : {1, 3, 4}) {
      for (const bool renormalize : {false, true}) {
        cases.push_back({.num_tokens = tokens,
                         .config = {.num_experts = 256,
                                    .kind = TopKRouter{.top_k = 8,
                                                       .score = Score::kSigmoid,
                                                       .renormalize = renormalize,
                                                       .scale = 2.5F,
                                                       .groups = 8,
                                                       .top_groups = top_groups,
                                                       .group_score = GroupScore::kTop2Sum}},
                         .bias = tokens % 2 == 0 || renormalize,
                         .ties = tokens == 500 || top_groups == 3,
                         .top_score = top_groups == 1});
        cases.push_back(cases.back());
        cases.back().config.as_top_k().group_score = GroupScore::kMax;
        cases.back().bias = true;
      }
    }
  }
  return cases;
}

TEST(RouteCuda, ChoosesTheExpertsOfTheCpuWithItsWeights) {
  unsigned seed = 0;
  for (const RouteCase& c : route_cases()) {
    const RouterConfig& config = c.config;
    std::vector<float> logits = random_floats(c.num_tokens * config.num_experts, ++seed, 2.0F);
    if (c.ties) {
      for (float& x : logits) x = std::round(2 * x) / 2;
    }
    std::vector<float> bias = random_floats(c.bias ? config.num_experts : 0, seed + 1000, 0.1F);
    if (c.ties) {
      for (float& x : bias) x = std::round(4 * x) / 4;
    }
    const std::int64_t picks = c.num_tokens * config.top_k();
    std::vector<std::int32_t> expert(index(picks));
    std::vector<float> weight(index(picks)), top(index(c.num_tokens));
    RouteArgs args{.logits = {logits.data(), {c.num_tokens, config.num_experts}},
                   .selection_bias = {c.bias ? bias.data() : nullptr, {std::ssize(bias)}},
                   .config = config,
                   .routing = {.expert = {expert.data(), {c.num_tokens, config.top_k()}},
                               .weight = {weight.data(), {c.num_tokens, config.top_k()}}},
                   .request = {.top_score = {top.data(), {c.num_tokens}}}};
    if (!c.top_score) args.request.top_score = {};
    route(args);
    const StageContext context(c.num_tokens, config.top_k(), config.num_experts, 8);
    const DeviceArray<float> device_logits(logits), device_bias(bias);
    const DeviceArray<std::int32_t> device_expert(expert.size());
    const DeviceArray<float> device_weight(weight.size()), device_top(top.size());
    args.logits.data = device_logits.data();
    if (c.bias) args.selection_bias.data = device_bias.data();
    args.routing = {.expert = device_expert.matrix(c.num_tokens, config.top_k()),
                    .weight = device_weight.matrix(c.num_tokens, config.top_k())};
    args.request.top_score = device_top.vector();
    if (!c.top_score) args.request.top_score = {};
    args.execution = context.execution();
    route(args);
    ASSERT_EQ(device_expert.get(), expert) << "case " << seed << ", E " << config.num_experts;
    // A sum of E floats in two orders, and two functions exp.
    const float tolerance = 1.2e-7F * static_cast<float>(8 + config.num_experts / 4);
    const std::vector<float> got = device_weight.get();
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], weight[i], tolerance * std::abs(weight[i]) + 1e-30F) << "case " << seed;
    }
    if (c.top_score) {
      const std::vector<float> got_top = device_top.get();
      for (std::size_t t = 0; t < top.size(); ++t)
        ASSERT_NEAR(got_top[t], top[t], tolerance * top[t]);
    }
    EXPECT_TRUE(context.status().ok());
  }
}

TEST(RouteCuda, EightOf256ExpertsOfAtMostFourGroupsGoByGroups) {
  const auto takes = [](auto&& change) {
    RouteArgs args{.config = {.num_experts = 256,
                              .kind = TopKRouter{.top_k = 8,
                                                 .score = Score::kSigmoid,
                                                 .groups = 8,
                                                 .top_groups = 4,
                                                 .group_score = GroupScore::kTop2Sum}}};
    change(args);
    return routing::takes_groups(args);
  };
  EXPECT_TRUE(takes([](RouteArgs&) {}));
  EXPECT_FALSE(takes([](RouteArgs& a) { a.config.as_top_k().top_groups = 5; }));
  EXPECT_FALSE(takes([](RouteArgs& a) { a.config.as_top_k().groups = 16; }));
  EXPECT_FALSE(takes([](RouteArgs& a) { a.config.as_top_k().top_k = 6; }));
  EXPECT_FALSE(takes([](RouteArgs& a) { a.config.num_experts = 128; }));
  EXPECT_FALSE(takes([](RouteArgs& a) { a.config.as_top_k().score = Score::kSoftmax; }));
  // Then logits are compared.
  EXPECT_FALSE(takes([](RouteArgs& a) { a.config.as_top_k().group_score = GroupScore::kMax; }));
}

TEST(RouteCuda, NanLeavesTheLowestTokenAndExpertInTheStatusAndNoExpert) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> logits(100 * 40, 1.0F);
  logits[97 * 40 + 1] = kNan;
  logits[41 * 40 + 36] = kNan;
  logits[41 * 40 + 3] = -kNan;
  const StageContext context(100, 2, 40, 8);
  const DeviceArray<float> device_logits(logits), weight(200);
  const DeviceArray<std::int32_t> expert(200);
  route({.logits = device_logits.matrix(100, 40),
         .config = {.num_experts = 40, .kind = TopKRouter{.top_k = 2}},
         .routing = {.expert = expert.matrix(100, 2), .weight = weight.matrix(100, 2)},
         .execution = context.execution()});
  EXPECT_EQ(context.status().nan_logit, std::uint64_t{41} << 32 | 3U);
  EXPECT_EQ(expert.get()[82], -1);
  EXPECT_EQ(expert.get()[83], -1);
  EXPECT_EQ(expert.get()[84], 0);
}

TEST(RouteCuda, AmongGroupsNanIsReportedAndInfinitiesAreScores) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> logits = random_floats(50 * 256, 3);
  logits[17 * 256 + 200] = kNan;
  logits[17 * 256 + 130] = -kNan;
  logits[44 * 256 + 3] = kNan;
  for (const std::size_t e : {5U, 40U, 70U, 99U}) logits[20 * 256 + e] = kInf;
  for (const std::size_t e : {6U, 41U, 255U}) logits[20 * 256 + e] = -kInf;
  for (std::size_t e = 0; e < 256; ++e) logits[30 * 256 + e] = -kInf;
  const StageContext context(50, 8, 256, 8);
  const DeviceArray<float> device_logits(logits), bias(random_floats(256, 4, 0.1F)), weight(400);
  const DeviceArray<std::int32_t> expert(400);
  route({.logits = device_logits.matrix(50, 256),
         .selection_bias = bias.vector(),
         .config = {.num_experts = 256,
                    .kind = TopKRouter{.top_k = 8,
                                       .score = Score::kSigmoid,
                                       .groups = 8,
                                       .top_groups = 4,
                                       .group_score = GroupScore::kTop2Sum}},
         .routing = {.expert = expert.matrix(50, 8), .weight = weight.matrix(50, 8)},
         .execution = context.execution()});
  EXPECT_EQ(context.status().nan_logit, std::uint64_t{17} << 32 | 130U);
  const std::vector<std::int32_t> chosen = expert.get();
  const std::vector<float> weights = weight.get();
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const bool broken = i / 8 == 17 || i / 8 == 44;
    EXPECT_EQ(chosen[i] == -1, broken) << i;
    EXPECT_TRUE(std::isfinite(weights[i])) << i;
  }
}

TEST(RouteCuda, InfiniteLogitsGiveFiniteWeights) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Score score : {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid}) {
    for (const bool renormalize : {false, true}) {
      const DeviceArray<float> logits(std::vector<float>{kInf, kInf, 0, -kInf, 0, 1, -kInf, -kInf,
                                                         -kInf, -kInf, kInf, 0, -200, -201, -202});
      const DeviceArray<float> weight(10);
      const DeviceArray<std::int32_t> expert(10);
      const StageContext context(5, 2, 3, 8);
      route({.logits = logits.matrix(5, 3),
             .config = {.num_experts = 3,
                        .kind = TopKRouter{.top_k = 2, .score = score, .renormalize = renormalize}},
             .routing = {.expert = expert.matrix(5, 2), .weight = weight.matrix(5, 2)},
             .execution = context.execution()});
      for (const float w : weight.get()) EXPECT_TRUE(std::isfinite(w));
      EXPECT_TRUE(context.status().ok());
    }
  }
}

TEST(RouteCuda, TheScoreSparseMixerIsRefusedByName) {
  const DeviceArray<float> logits(std::vector<float>{1, 2, 3, 4});
  const DeviceArray<float> weight(2);
  const DeviceArray<std::int32_t> expert(2);
  const StageContext context(1, 2, 4, 8);
  test::expect_error(ErrorCode::kUnsupported, "no score sparse-mixer", [&] {
    route(
        {.logits = logits.matrix(1, 4),
         .config = {.num_experts = 4, .kind = TopKRouter{.top_k = 2, .score = Score::kSparseMixer}},
         .routing = {.expert = expert.matrix(1, 2), .weight = weight.matrix(1, 2)},
         .execution = context.execution()});
  });
}

struct GemmCase {
  DType tokens, gate;
  std::int64_t num_tokens, num_experts, hidden;
};

TEST(RouterGemmCuda, WithBatchInvariantIsTheProductToFp32AccuracyAndATokensBitsAreItsOwn) {
  using enum DType;
  for (const GemmCase& c : {GemmCase{kBF16, kBF16, 300, 70, 1000},
                            {kF16, kF16, 300, 64, 512},
                            {kBF16, kF32, 300, 129, 520},
                            {kF16, kF32, 70, 33, 264},
                            {kF32, kF32, 300, 130, 1000},
                            {kBF16, kBF16, 4200, 136, 264},
                            {kF32, kF32, 4200, 136, 264},
                            {kF16, kF32, 4200, 100, 264},
                            {kBF16, kBF16, 1, 1, 8},
                            {kBF16, kBF16, 33, 256, 2048}}) {
    const std::vector<std::byte> x = stored_as(c.tokens, random_floats(c.num_tokens * c.hidden, 1));
    const std::vector<std::byte> w = stored_as(c.gate, random_floats(c.num_experts * c.hidden, 2));
    const std::vector<float> bias = random_floats(c.num_experts, 3);
    const DeviceArray<std::byte> tokens(x), gate(w);
    const DeviceArray<float> device_bias(bias);
    const StageContext context(c.num_tokens, 1, c.num_experts, c.hidden);
    const auto run = [&](std::int64_t first, std::int64_t count) {
      const DeviceArray<float> logits(index(count * c.num_experts));
      Execution execution = context.execution();
      execution.batch_invariant = true;
      router_gemm({.tokens = {tokens.bytes() + first * c.hidden * size_of(c.tokens), c.tokens,
                              count, c.hidden},
                   .gate = {gate.bytes(), c.gate, c.num_experts, c.hidden},
                   .bias = device_bias.vector(),
                   .logits = logits.matrix(count, c.num_experts),
                   .execution = execution});
      return logits.get();
    };
    const std::vector<float> all = run(0, c.num_tokens);
    for (std::int64_t t = 0; t < c.num_tokens; t += c.num_tokens / 7 + 1) {
      for (std::int64_t e = 0; e < c.num_experts; ++e) {
        double sum = 0;
        double size = 0;
        for (std::int64_t h = 0; h < c.hidden; ++h) {
          const double product = double{load_float(x.data(), c.tokens, t * c.hidden + h)} *
                                 double{load_float(w.data(), c.gate, e * c.hidden + h)};
          sum += product;
          size += std::abs(product);
        }
        ASSERT_NEAR(all[index(t * c.num_experts + e)], sum + bias[index(e)], 2e-6 * size + 1e-6)
            << "token " << t << " expert " << e << " H " << c.hidden;
      }
    }
    for (const std::int64_t count : {1, 20, 70}) {
      const std::int64_t first = c.num_tokens / 2;
      if (first + count > c.num_tokens) continue;
      const auto begin = all.begin() + first * c.num_experts;
      EXPECT_EQ(run(first, count), std::vector<float>(begin, begin + count * c.num_experts));
    }
    EXPECT_EQ(run(0, c.num_tokens), all);
  }
}

/// Tokens and gate of one type, larger than any case, and what some tokens' logits are in double.
struct SharedGemm {
  static constexpr std::int64_t kTokens = 4097;
  static constexpr std::int64_t kExperts = 1024;
  DType type;
  std::int64_t hidden;
  std::vector<std::byte> x = stored_as(type, random_floats(kTokens* hidden, 1));
  std::vector<std::byte> w = stored_as(type, random_floats(kExperts* hidden, 2));
  std::vector<float> bias = random_floats(kExperts, 3);
  DeviceArray<std::byte> tokens{x}, gate{w};
  DeviceArray<float> device_bias{bias};

  struct Exact {
    double sum = 0;
    double size = 0;  ///< Of the products, without their signs.
  };
  [[nodiscard]] std::vector<Exact> logits_of(std::int64_t token) const {
    std::vector<Exact> logits(index(kExperts));
    for (std::int64_t e = 0; e < kExperts; ++e) {
      Exact& exact = logits[index(e)];
      for (std::int64_t h = 0; h < hidden; ++h) {
        const double product = double{load_float(x.data(), type, token * hidden + h)} *
                               double{load_float(w.data(), type, e * hidden + h)};
        exact.sum += product;
        exact.size += std::abs(product);
      }
    }
    return logits;
  }

  /// Of the first tokens and experts; behind the last logit nothing may be written.
  [[nodiscard]] std::vector<float> run(std::int64_t num_tokens, std::int64_t num_experts,
                                       bool biased) const {
    constexpr std::size_t kBehind = 64;
    constexpr float kUntouched = -12345.0F;
    const std::size_t size = index(num_tokens * num_experts);
    const DeviceArray<float> logits(std::vector<float>(size + kBehind, kUntouched));
    const StageContext context(num_tokens, 1, num_experts, hidden);
    router_gemm({.tokens = {tokens.bytes(), type, num_tokens, hidden},
                 .gate = {gate.bytes(), type, num_experts, hidden},
                 .bias = biased ? Vector<const float>{device_bias.data(), {num_experts}}
                                : Vector<const float>{},
                 .logits = logits.matrix(num_tokens, num_experts),
                 .execution = context.execution()});
    std::vector<float> got = logits.get();
    EXPECT_EQ(std::vector<float>(got.begin() + std::ssize(got) - 64, got.end()),
              std::vector<float>(kBehind, kUntouched));
    got.resize(size);
    return got;
  }
};

TEST(RouterGemmCuda, AnyNumberOfTokensGetsTheProductToFp32AccuracyWithTheSameBitsEveryTime) {
  for (const DType type : {DType::kBF16, DType::kF16}) {
    for (const std::int64_t hidden : {8, 72, 2048, 8200}) {
      const SharedGemm gemm{.type = type, .hidden = hidden};
      std::map<std::int64_t, std::vector<SharedGemm::Exact>> exact;
      for (const std::int64_t token : {0, 1, 2, 3, 63, 64, 128, 511, 512, 999, 4096}) {
        exact[token] = gemm.logits_of(token);
      }
      for (const std::int64_t num_tokens : {1, 2, 3, 4, 5, 64, 65, 129, 513, 1000, 4097}) {
        for (const std::int64_t num_experts : {1, 8, 33, 64, 96, 128, 160, 256, 257, 1024}) {
          const bool biased = num_experts % 2 == 0;
          const std::vector<float> got = gemm.run(num_tokens, num_experts, biased);
          for (const auto& [token, logits] : exact) {
            if (token >= num_tokens) continue;
            for (std::int64_t e = 0; e < num_experts; ++e) {
              const double bias = biased ? double{gemm.bias[index(e)]} : 0.0;
              ASSERT_NEAR(got[index(token * num_experts + e)], logits[index(e)].sum + bias,
                          2e-6 * logits[index(e)].size + 1e-6)
                  << "token " << token << " of " << num_tokens << ", expert " << e << " of "
                  << num_experts << ", H " << hidden;
            }
          }
          ASSERT_EQ(gemm.run(num_tokens, num_experts, biased), got);
        }
      }
    }
  }
}

TEST(RouterGemmCuda, SmallShapesOfEveryKernelAreRight) {
  const SharedGemm gemm{.type = DType::kBF16, .hidden = 520};
  const std::vector<SharedGemm::Exact> first = gemm.logits_of(0);
  for (const std::int64_t num_tokens : {1, 4, 30, 70, 300}) {
    const std::vector<SharedGemm::Exact> last = gemm.logits_of(num_tokens - 1);
    for (const std::int64_t num_experts : {33, 100, 180, 250}) {
      const std::vector<float> got = gemm.run(num_tokens, num_experts, false);
      for (std::int64_t e = 0; e < num_experts; ++e) {
        const auto near = [&](const SharedGemm::Exact& want, std::int64_t token) {
          EXPECT_NEAR(got[index(token * num_experts + e)], want.sum, 2e-6 * want.size + 1e-6)
              << "token " << token << " of " << num_tokens << ", expert " << e << " of "
              << num_experts;
        };
        near(first[index(e)], 0);
        near(last[index(e)], num_tokens - 1);
      }
    }
  }
}

}  // namespace
}  // namespace switchyard
