// The stages around the experts on a GPU against the CPU: plans, drops, ids and sums bit for bit.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "combine/combine_pair.hpp"
#include "core/half.hpp"
#include "plan/plan_few.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/dispatch.hpp"
#include "switchyard/error.hpp"
#include "switchyard/route.hpp"
#include "tests/cuda/stage_support.hpp"

namespace switchyard {
namespace {

struct RouteCase {
  std::int64_t num_tokens;
  RouterConfig config;
  bool bias = false;
  bool ties = false;
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
        cases.push_back({.num_tokens = tokens,
                         .config = {.num_experts = experts,
                                    .top_k = top_k,
                                    .score = score,
                                    .renormalize = renormalize,
                                    .scale = 2.5F}});
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
                                        .top_k = top_k,
                                        .score = score,
                                        .renormalize = renormalize,
                                        .groups = groups,
                                        .top_groups = top_groups,
                                        .group_score = group},
                             .bias = bias});
          }
        }
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
    const std::vector<float> bias =
        random_floats(c.bias ? config.num_experts : 0, seed + 1000, 0.1F);
    const std::int64_t picks = c.num_tokens * config.top_k;
    std::vector<std::int32_t> expert(index(picks));
    std::vector<float> weight(index(picks)), top(index(c.num_tokens));
    RouteArgs args{.logits = {logits.data(), {c.num_tokens, config.num_experts}},
                   .selection_bias = {c.bias ? bias.data() : nullptr, {std::ssize(bias)}},
                   .config = config,
                   .routing = {.expert = {expert.data(), {c.num_tokens, config.top_k}},
                               .weight = {weight.data(), {c.num_tokens, config.top_k}},
                               .top_score = {top.data(), {c.num_tokens}}}};
    route(args);
    const StageContext context(c.num_tokens, config.top_k, config.num_experts, 8);
    const DeviceArray<float> device_logits(logits), device_bias(bias);
    const DeviceArray<std::int32_t> device_expert(expert.size());
    const DeviceArray<float> device_weight(weight.size()), device_top(top.size());
    args.logits.data = device_logits.data();
    if (c.bias) args.selection_bias.data = device_bias.data();
    args.routing = {.expert = device_expert.matrix(c.num_tokens, config.top_k),
                    .weight = device_weight.matrix(c.num_tokens, config.top_k),
                    .top_score = device_top.vector()};
    args.execution = context.execution();
    route(args);
    ASSERT_EQ(device_expert.get(), expert) << "case " << seed << ", E " << config.num_experts;
    // A sum of E floats in two orders, and two functions exp.
    const float tolerance = 1.2e-7F * static_cast<float>(8 + config.num_experts / 4);
    const std::vector<float> got = device_weight.get();
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], weight[i], tolerance * std::abs(weight[i]) + 1e-30F) << "case " << seed;
    }
    const std::vector<float> got_top = device_top.get();
    for (std::size_t t = 0; t < top.size(); ++t)
      ASSERT_NEAR(got_top[t], top[t], tolerance * top[t]);
    EXPECT_TRUE(context.status().ok());
  }
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
         .config = {.num_experts = 40, .top_k = 2},
         .routing = {.expert = expert.matrix(100, 2), .weight = weight.matrix(100, 2)},
         .execution = context.execution()});
  EXPECT_EQ(context.status().nan_logit, std::uint64_t{41} << 32 | 3U);
  EXPECT_EQ(expert.get()[82], -1);
  EXPECT_EQ(expert.get()[83], -1);
  EXPECT_EQ(expert.get()[84], 0);
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
             .config = {.num_experts = 3, .top_k = 2, .score = score, .renormalize = renormalize},
             .routing = {.expert = expert.matrix(5, 2), .weight = weight.matrix(5, 2)},
             .execution = context.execution()});
      for (const float w : weight.get()) EXPECT_TRUE(std::isfinite(w));
      EXPECT_TRUE(context.status().ok());
    }
  }
}

struct GemmCase {
  DType tokens, gate;
  std::int64_t num_tokens, num_experts, hidden;
};

std::vector<std::byte> rounded(const std::vector<float>& values, DType type) {
  std::vector<std::byte> bytes(values.size() * index(size_of(type)));
  for (std::int64_t i = 0; i < std::ssize(values); ++i) {
    store_float(bytes.data(), type, i, values[index(i)]);
  }
  return bytes;
}

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
    const std::vector<std::byte> x = rounded(random_floats(c.num_tokens * c.hidden, 1), c.tokens);
    const std::vector<std::byte> w = rounded(random_floats(c.num_experts * c.hidden, 2), c.gate);
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
  std::vector<std::byte> x = rounded(random_floats(kTokens * hidden, 1), type);
  std::vector<std::byte> w = rounded(random_floats(kExperts * hidden, 2), type);
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

TEST(PlanCuda, IsThePlanOfTheCpuBitForBitInEveryLayout) {
  const struct {
    std::int64_t tokens, top_k;
    std::int32_t experts, first, count;
  } cases[] = {{8, 8, 256, 0, 256},       {4, 8, 256, 128, 100},   {2, 32, 1024, 0, 1024},
               {21, 3, 2, 0, 2},          {0, 2, 4, 0, 4},         {1, 1, 1, 0, 1},
               {1, 8, 8, 0, 8},           {7, 3, 5, 2, 2},         {64, 1, 64, 0, 64},
               {300, 4, 9, 3, 6},         {9000, 2, 31, 0, 31},    {500, 16, 16, 8, 8},
               {4096, 8, 256, 0, 256},    {16384, 2, 128, 0, 128}, {200000, 8, 128, 64, 64},
               {3000, 32, 1024, 0, 1024}, {700, 3, 5, 5, 0}};
  unsigned seed = 0;
  for (const auto& c : cases) {
    const RandomRouting routed(c.tokens * c.top_k, c.experts, ++seed);
    const DeviceArray<std::int32_t> expert(routed.expert);
    const DeviceArray<float> weight(routed.weight);
    const DeviceArray<std::uint8_t> kept(routed.kept);
    const StageContext context(c.tokens, c.top_k, c.experts, 8);
    for (const bool masked : {false, true}) {
      for (const auto& [layout, padded] :
           {std::pair{Layout{}, std::int64_t{0}},
            {Layout{LayoutKind::kAligned, 16}, 0},
            {Layout{LayoutKind::kPadded}, std::min<std::int64_t>(c.tokens * c.top_k, 60000)}}) {
        Plan owner;
        const std::int64_t rows = max_rows(layout, c.tokens, c.top_k, c.count, padded);
        PlanArgs args{.expert = {routed.expert.data(), {c.tokens, c.top_k}},
                      .weight = {routed.weight.data(), {c.tokens, c.top_k}},
                      .first_expert = c.first,
                      .total_experts = c.experts,
                      .layout = layout,
                      .padded_rows = padded,
                      .plan = owner.reserve(c.tokens, c.top_k, c.count, rows)};
        if (masked) args.kept = {routed.kept.data(), {c.tokens, c.top_k}};
        try {
          plan(args);
        } catch (const Error&) {
          continue;  // more rows than padded_rows: another test
        }
        const TestPlan device(c.tokens, c.top_k, c.count, rows);
        args.expert.data = expert.data();
        args.weight.data = weight.data();
        if (masked) args.kept.data = kept.data();
        args.plan = device.view();
        args.execution = context.execution();
        plan(args);
        ASSERT_EQ(device.contents(), contents(owner.view())) << c.tokens << " " << c.experts;
        plan(args);
        ASSERT_EQ(device.contents(), contents(owner.view())) << "again";
      }
    }
    EXPECT_TRUE(context.status().ok());
  }
}

TEST(PlanCuda, UpTo64AssignmentsOfACompactLayoutAreCompared) {
  EXPECT_TRUE(planning::are_few(8, 8, true));
  EXPECT_FALSE(planning::are_few(65, 1, true));
  EXPECT_FALSE(planning::are_few(8, 8, false));
  EXPECT_FALSE(planning::are_few(0, 8, true));
}

TEST(PlanCuda, BadIdsAndRowsBeyondThePaddingAreSkippedAndCounted) {
  RandomRouting routed(40, 4, 1);
  routed.expert.assign(40, 0);
  routed.expert[5] = 7;
  routed.expert[6] = -3;
  routed.expert[7] = 1 << 30;
  const DeviceArray<std::int32_t> expert(routed.expert);
  const DeviceArray<float> weight(routed.weight);
  const StageContext context(20, 2, 4, 8);
  const TestPlan device(20, 2, 4, 40);
  plan({.expert = expert.matrix(20, 2),
        .weight = weight.matrix(20, 2),
        .total_experts = 4,
        .layout = {LayoutKind::kPadded},
        .padded_rows = 10,
        .plan = device.view(),
        .execution = context.execution()});
  EXPECT_EQ(context.status().bad_ids, 3U);
  EXPECT_EQ(context.status().lost_rows, 27U);
  const std::vector<std::int32_t> all = device.contents();
  EXPECT_EQ(std::vector<std::int32_t>(all.begin(), all.begin() + 9),
            (std::vector<std::int32_t>{0, 10, 20, 30, 40, 10, 0, 0, 0}));
}

TEST(PlanCuda, BadIdsAmongAFewAreSkippedAndCounted) {
  RandomRouting routed(8, 4, 1);
  routed.expert = {3, 7, -1, 0, 1 << 30, 3, -3, 0};
  const DeviceArray<std::int32_t> expert(routed.expert);
  const DeviceArray<float> weight(routed.weight);
  const StageContext context(4, 2, 4, 8);
  const TestPlan device(4, 2, 4, 8);
  plan({.expert = expert.matrix(4, 2),
        .weight = weight.matrix(4, 2),
        .total_experts = 4,
        .plan = device.view(),
        .execution = context.execution()});
  EXPECT_EQ(context.status().bad_ids, 3U);
  const std::vector<std::int32_t> all = device.contents();
  EXPECT_EQ(std::vector<std::int32_t>(all.begin(), all.begin() + 9),
            (std::vector<std::int32_t>{0, 2, 2, 2, 4, 2, 0, 0, 2}));
}

TEST(CapacityCuda, KeepsWhatTheCpuKeepsUnderEveryPolicy) {
  unsigned seed = 0;
  for (const auto& [tokens, top_k, experts] : {std::array<std::int32_t, 3>{1, 1, 1},
                                               {7, 3, 5},
                                               {4096, 8, 256},
                                               {30000, 2, 128},
                                               {100000, 4, 17},
                                               {513, 8, 1024},
                                               {0, 2, 4}}) {
    const RandomRouting routed(tokens * top_k, experts, ++seed);
    std::vector<float> score = random_floats(tokens, seed);
    for (float& x : score) x = std::round(4 * x) / 4;
    const DeviceArray<std::int32_t> expert(routed.expert);
    const DeviceArray<float> weight(routed.weight), device_score(score);
    const StageContext context(tokens, top_k, experts, 8);
    for (const DropPolicy policy :
         {DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs, DropPolicy::kBpr}) {
      for (const bool scored : {false, true}) {
        for (const double factor : {0.0, 0.5, 1.0, 4.0}) {
          const std::int64_t picks = tokens * top_k;
          std::vector<std::uint8_t> kept(index(picks));
          std::vector<std::int64_t> counts(index(experts)), counts_kept(index(experts));
          CapacityArgs args{
              .expert = {routed.expert.data(), {tokens, top_k}},
              .weight = {routed.weight.data(), {tokens, top_k}},
              .top_score = {scored ? score.data() : nullptr, {tokens}},
              .num_experts = experts,
              .capacity = factor == 0.0 ? 0 : capacity_of(factor, tokens, top_k, experts),
              .policy = policy,
              .kept = {kept.data(), {tokens, top_k}},
              .counts = {counts.data(), {experts}},
              .counts_kept = {counts_kept.data(), {experts}}};
          apply_capacity(args);
          const DeviceArray<std::uint8_t> device_kept(kept.size());
          const DeviceArray<std::int64_t> device_counts(counts.size());
          const DeviceArray<std::int64_t> device_counts_kept(counts.size());
          args.expert.data = expert.data();
          args.weight.data = weight.data();
          if (scored) args.top_score.data = device_score.data();
          args.kept = device_kept.matrix(tokens, top_k);
          args.counts = device_counts.vector();
          args.counts_kept = device_counts_kept.vector();
          args.execution = context.execution();
          apply_capacity(args);
          ASSERT_EQ(device_kept.get(), kept) << tokens << " policy " << static_cast<int>(policy);
          ASSERT_EQ(device_counts.get(), counts);
          ASSERT_EQ(device_counts_kept.get(), counts_kept);
        }
      }
    }
    EXPECT_TRUE(context.status().ok());
  }
}

/// A routing, its plan on both sides, and 16-bit or f32 rows.
struct Rows {
  std::int64_t num_tokens, top_k, hidden;
  DType dtype;
  Layout layout;
  Plan owner{};
  PlanView host{};
  std::int64_t rows = 0;

  Rows(std::int64_t t, std::int64_t k, std::int64_t h, std::int32_t experts, DType type,
       const Layout& how, unsigned seed)
      : num_tokens(t), top_k(k), hidden(h), dtype(type), layout(how) {
    const RandomRouting routed(t * k, experts, seed);
    rows = max_rows(layout, t, k, experts, t * k);
    host = owner.reserve(t, k, experts, rows);
    plan({.expert = {routed.expert.data(), {t, k}},
          .weight = {routed.weight.data(), {t, k}},
          .layout = layout,
          .padded_rows = t * k,
          .plan = host});
  }

  /// The same plan in device memory.
  void copy_to(const TestPlan& device) const {
    const PlanView view = device.view();
    const auto copy = [](auto to, auto from) {
      SWITCHYARD_CUDA(cudaMemcpy(to.data, from.data, index(from.shape[0]) * sizeof(*from.data),
                                 cudaMemcpyHostToDevice));
    };
    copy(view.expert_begin, host.expert_begin);
    copy(view.expert_rows, host.expert_rows);
    copy(view.row_token, host.row_token);
    copy(view.row_weight, host.row_weight);
    copy(view.token_begin, host.token_begin);
    copy(view.token_row, host.token_row);
  }

  [[nodiscard]] std::vector<std::byte> random(std::int64_t count, unsigned seed) const {
    const std::vector<float> values = random_floats(count, seed);
    std::vector<std::byte> bytes(index(count * size_of(dtype)));
    for (std::int64_t i = 0; i < count; ++i) {
      store_float(bytes.data(), dtype, i, values[index(i)]);
    }
    return bytes;
  }
};

TEST(PackCuda, GivesTheBytesOfTheCpuInEveryLayout) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Layout& layout :
         {Layout{}, Layout{LayoutKind::kAligned, 16}, Layout{LayoutKind::kPadded}}) {
      for (const auto& [tokens, top_k, hidden, experts] : {std::array<std::int32_t, 4>{1, 1, 8, 1},
                                                           {50, 4, 1032, 9},
                                                           {300, 2, 520, 16},
                                                           {40, 40, 16, 6}}) {
        const Rows r(tokens, top_k, hidden, experts, dtype, layout, 3);
        const std::vector<std::byte> x = r.random(tokens * hidden, 4);
        std::vector<std::byte> packed(index(r.rows * hidden * size_of(dtype)), std::byte{0xff});
        PackArgs args{.x = {x.data(), dtype, tokens, hidden},
                      .plan = r.host,
                      .rows = {packed.data(), dtype, r.rows, hidden}};
        pack(args);
        const TestPlan device(tokens, top_k, experts, r.rows);
        r.copy_to(device);
        const DeviceArray<std::byte> device_x(x), device_rows(packed.size());
        args.x.data = device_x.bytes();
        args.rows.data = device_rows.bytes();
        args.plan = device.view();
        args.execution.backend = Backend::kCuda;
        pack(args);
        EXPECT_EQ(device_rows.get(), packed) << tokens << " " << hidden;
      }
    }
  }
}

/// Tokens, top_k, hidden, experts, groups.
using CombineShape = std::array<std::int32_t, 5>;

void expect_combined_as_on_the_cpu(const CombineShape& shape, DType dtype, DType sums,
                                   bool each_group, unsigned seed) {
  const auto& [tokens, top_k, hidden, experts, groups] = shape;
  const Rows r(tokens, top_k, hidden, experts, dtype, {}, seed);
  const std::vector<std::byte> y = r.random(r.rows * hidden, seed);
  const std::int64_t out_rows = std::int64_t{tokens} * (each_group ? groups : 1);
  std::vector<std::byte> out(index(out_rows * hidden * size_of(sums)), std::byte{0xff});
  CombineArgs args{.rows = {y.data(), dtype, r.rows, hidden},
                   .plan = r.host,
                   .reduced = {.sums = {out.data(), sums, out_rows, hidden},
                               .subtree = {.order = {.num_experts = experts, .groups = groups},
                                           .num_groups = groups},
                               .each_group = each_group}};
  combine(args);
  const TestPlan device(tokens, top_k, experts, r.rows);
  r.copy_to(device);
  const DeviceArray<std::byte> device_y(y), device_out(out.size());
  args.rows.data = device_y.bytes();
  args.reduced.sums.data = device_out.bytes();
  args.plan = device.view();
  args.execution.backend = Backend::kCuda;
  combine(args);
  ASSERT_TRUE(device_out.get() == out)
      << tokens << " " << hidden << " groups " << groups << " each " << each_group;
}

TEST(CombineCuda, GivesTheBitsOfTheCpu) {
  unsigned seed = 10;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType sums : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const CombineShape& shape : {CombineShape{1, 1, 8, 1, 1},
                                        {50, 4, 1032, 20, 8},
                                        {300, 2, 264, 16, 8},
                                        {20, 40, 16, 50, 8},
                                        {33, 8, 520, 64, 64},
                                        {9, 6, 32, 7, 5},
                                        {40, 8, 512, 256, 8}}) {
        for (const bool each_group : {false, true}) {
          expect_combined_as_on_the_cpu(shape, dtype, sums, each_group, ++seed);
        }
      }
    }
  }
}

TEST(CombineCuda, BulkCopiesTakeLongRowsOfManyTokensThatHaveTwoAtMost) {
  const PairProblem pairs{.num_tokens = 16384,
                          .rows_per_token = 2,
                          .row_bytes = 8192,
                          .in = DType::kF16,
                          .out = DType::kF16,
                          .hopper = true};
  EXPECT_TRUE(takes_pairs(pairs));
  const auto takes = [&](auto&& change) {
    PairProblem problem = pairs;
    change(problem);
    return takes_pairs(problem);
  };
  EXPECT_FALSE(takes([](PairProblem& p) { p.num_tokens = 4095; }));
  EXPECT_FALSE(takes([](PairProblem& p) { p.rows_per_token = 3; }));
  EXPECT_FALSE(takes([](PairProblem& p) { p.row_bytes = 4080; }));
  EXPECT_FALSE(takes([](PairProblem& p) { p.out = DType::kF32; }));
  EXPECT_FALSE(takes([](PairProblem& p) { p.each_group = true; }));
  EXPECT_FALSE(takes([](PairProblem& p) { p.hopper = false; }));
}

TEST(CombineCuda, LongRowsOfManyTokensGiveTheBitsOfTheCpu) {
  // On Hopper these go by bulk copies: whole rows, and pieces of them; two groups, one, and many.
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    unsigned seed = 90;
    for (const CombineShape& shape : {CombineShape{4200, 2, 2056, 20, 8},
                                      {4096, 1, 4096, 5, 1},
                                      {4100, 2, 2304, 6, 2},
                                      {4100, 2, 2048, 3, 1}}) {
      expect_combined_as_on_the_cpu(shape, dtype, dtype, false, ++seed);
    }
  }
}

TEST(FinishCuda, GivesTheBitsOfTheCpu) {
  unsigned seed = 50;
  for (const DType wire : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType out_type : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const auto& [tokens, ranks, groups] :
           {std::array<std::int32_t, 3>{9, 8, 1}, {20, 3, 1}, {5, 2, 4}, {7, 1, 8}, {3, 64, 1}}) {
        const std::int64_t hidden = 72;
        const Rows r(1, 1, 8, 1, wire, {}, ++seed);
        const std::vector<std::byte> partials = r.random(tokens * ranks * groups * hidden, seed);
        std::vector<std::int32_t> row;
        for (std::int32_t i = 0; i < tokens * ranks; ++i) row.push_back(i % 3 == 0 ? -1 : i);
        const std::vector<float> shared = random_floats(tokens * hidden, seed);
        std::vector<std::byte> out(index(tokens * hidden * size_of(out_type)));
        FinishArgs args{.partials = {partials.data(), wire, tokens * ranks * groups, hidden},
                        .partial_row = {row.data(), {tokens, ranks}},
                        .groups_per_row = groups,
                        .shared = {shared.data(), {tokens, hidden}},
                        .out = {out.data(), out_type, tokens, hidden}};
        finish(args);
        const DeviceArray<std::byte> device_partials(partials), device_out(out.size());
        const DeviceArray<std::int32_t> device_row(row);
        const DeviceArray<float> device_shared(shared);
        args.partials.data = device_partials.bytes();
        args.partial_row.data = device_row.data();
        args.shared.data = device_shared.data();
        args.out.data = device_out.bytes();
        args.execution.backend = Backend::kCuda;
        finish(args);
        ASSERT_EQ(device_out.get(), out) << tokens << " " << ranks;
      }
    }
  }
}

TEST(StagesCuda, AGraphOfAllStagesFollowsNewRoutingWhenReplayed) {
  constexpr std::int64_t kTokens = 500, kHidden = 256, kExperts = 16, kTopK = 4;
  const StageContext context(kTokens, kTopK, kExperts, kHidden);
  const DeviceArray<float> logits(kTokens * kExperts), weight(kTokens * kTopK),
      sums(kTokens * kHidden);
  const DeviceArray<std::int32_t> expert(kTokens * kTopK);
  const DeviceArray<std::uint8_t> kept(kTokens * kTopK);
  const DeviceArray<std::int64_t> counts(kExperts), counts_kept(kExperts);
  const TestPlan device(kTokens, kTopK, kExperts, kTokens * kTopK);
  const std::vector<float> x = random_floats(kTokens * kHidden, 1);
  const DeviceArray<float> device_x(x), rows(kTokens * kTopK * kHidden);
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  const auto all = [&](const Execution& execution, Matrix<const float> in, const Routing& routing,
                       Matrix<std::uint8_t> keep, Vector<std::int64_t> wanted,
                       Vector<std::int64_t> had, const PlanView& view, const float* tokens,
                       float* packed, float* out) {
    route({.logits = in,
           .config = {.num_experts = kExperts, .top_k = kTopK},
           .routing = routing,
           .execution = execution});
    apply_capacity({.expert = routing.expert,
                    .weight = routing.weight,
                    .num_experts = kExperts,
                    .capacity = 100,
                    .policy = DropPolicy::kChoice,
                    .kept = keep,
                    .counts = wanted,
                    .counts_kept = had,
                    .execution = execution});
    plan({.expert = routing.expert,
          .weight = routing.weight,
          .kept = keep,
          .plan = view,
          .execution = execution});
    pack({.x = {reinterpret_cast<const std::byte*>(tokens), DType::kF32, kTokens, kHidden},
          .plan = view,
          .rows = {reinterpret_cast<std::byte*>(packed), DType::kF32, kTokens * kTopK, kHidden},
          .execution = execution});
    combine({.rows = {reinterpret_cast<const std::byte*>(packed), DType::kF32, kTokens * kTopK,
                      kHidden},
             .plan = view,
             .reduced = {.sums = {reinterpret_cast<std::byte*>(out), DType::kF32, kTokens, kHidden},
                         .subtree = {.order = {.num_experts = kExperts}}},
             .execution = execution});
  };
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  all(context.execution(stream), logits.matrix(kTokens, kExperts),
      {.expert = expert.matrix(kTokens, kTopK), .weight = weight.matrix(kTokens, kTopK)},
      kept.matrix(kTokens, kTopK), counts.vector(), counts_kept.vector(), device.view(),
      device_x.data(), rows.data(), sums.data());
  SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
  SWITCHYARD_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (unsigned seed = 0; seed < 20; ++seed) {
    const std::vector<float> values = random_floats(kTokens * kExperts, seed);
    logits.set(values);
    SWITCHYARD_CUDA(cudaGraphLaunch(replay, stream));
    std::vector<std::int32_t> host_expert(kTokens * kTopK);
    const std::vector<float> host_weight = weight.get();  // the last bits of exp are the device's
    std::vector<float> own_weight(kTokens * kTopK), packed(kTokens * kTopK * kHidden),
        out(kTokens * kHidden);
    std::vector<std::uint8_t> host_kept(kTokens * kTopK);
    std::vector<std::int64_t> a(kExperts), b(kExperts);
    Plan owner;
    const PlanView view = owner.reserve(kTokens, kTopK, kExperts, kTokens * kTopK);
    all({}, {values.data(), {kTokens, kExperts}},
        {.expert = {host_expert.data(), {kTokens, kTopK}},
         .weight = {own_weight.data(), {kTokens, kTopK}}},
        {host_kept.data(), {kTokens, kTopK}}, {a.data(), {kExperts}}, {b.data(), {kExperts}}, view,
        x.data(), packed.data(), out.data());
    ASSERT_EQ(expert.get(), host_expert);
    ASSERT_EQ(kept.get(), host_kept);
    const std::vector<float> got = sums.get();
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], out[i], 1e-5);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(StagesCuda, WhatNoKernelAcceptsIsAnErrorWithTheReason) {
  const StageContext context(4, 2, 2000, 12);
  const DeviceArray<float> data(10000);
  const DeviceArray<std::int32_t> ids(8);
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message([&] {
              route({.logits = data.matrix(4, 2000),
                     .config = {.num_experts = 2000, .top_k = 2},
                     .routing = {.expert = ids.matrix(4, 2), .weight = data.matrix(4, 2)},
                     .execution = context.execution()});
            }).find("num_experts exceeds 1024"),
            std::string::npos);
  EXPECT_NE(message([&] {
              router_gemm({.tokens = {data.bytes(), DType::kF32, 4, 12},
                           .gate = {data.bytes(), DType::kF32, 8, 12},
                           .logits = data.matrix(4, 8),
                           .execution = context.execution()});
            }).find("not a multiple of 8"),
            std::string::npos);
  EXPECT_NE(message([&] {
              router_gemm({.tokens = {data.bytes() + 4, DType::kF32, 4, 16},
                           .gate = {data.bytes(), DType::kF32, 8, 16},
                           .logits = data.matrix(4, 8),
                           .execution = context.execution()});
            }).find("not aligned"),
            std::string::npos);
  Execution small = context.execution();
  small.workspace_bytes = 256;
  const TestPlan device(4, 2, 4, 8);
  EXPECT_NE(message([&] {
              plan({.expert = ids.matrix(4, 2),
                    .weight = data.matrix(4, 2),
                    .plan = device.view(),
                    .execution = small});
            }).find("bytes of workspace"),
            std::string::npos);
}

}  // namespace
}  // namespace switchyard
