#include "reference/backward.hpp"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/reference/small_layer.hpp"

// The reference's gradients are those of its forward: central differences in double, of every
// number that a layer reads. The choice of experts stays what it was.

namespace switchyard::reference {
namespace {

constexpr double kStep = 0x1p-17;

template <typename T>
double difference(const SmallLayer& layer, T& number) {
  const T before = number;
  number = static_cast<T>(before + kStep);
  const double above = layer.loss();
  number = static_cast<T>(before - kStep);
  const double below = layer.loss();
  number = before;
  return (above - below) / (2 * kStep);
}

template <typename T>
void expect_differences(const SmallLayer& layer, const char* name, std::vector<T>& numbers,
                        std::span<const Bounded> gradient) {
  ASSERT_EQ(gradient.size(), numbers.size()) << name;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double want = difference(layer, numbers[i]);
    // The weights that the router made are fp32 in a routing.
    ASSERT_NEAR(gradient[i].value, want, 5e-7 * (1 + std::abs(want))) << name << " " << i;
    ASSERT_LT(gradient[i].error, 1e-3 * (1 + std::abs(want))) << name << " " << i;
  }
}

/// Rows of `part` [experts, inner, hidden] or [experts, inner] among those of w13 or b13.
std::vector<Bounded> rows_of(const ExpertConfig& config, const std::vector<Bounded>& all, bool up,
                             std::int64_t cols) {
  std::vector<Bounded> part;
  const std::int64_t size = config.inner * cols;
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    const auto begin = all.begin() + (config.gated ? 2 * e + (up ? 1 : 0) : e) * size;
    part.insert(part.end(), begin, begin + size);
  }
  return part;
}

void expect_expert_differences(const SmallLayer& layer, const ExpertConfig& config,
                               verify::PlainSource& source, const ExpertGradient& gradient) {
  const auto part = [&](const char* name, std::vector<float>& numbers,
                        const std::vector<Bounded>& all, bool up, std::int64_t cols) {
    expect_differences(layer, name, numbers, rows_of(config, all, up, cols));
  };
  part("w1", source.gate, gradient.w13, false, config.hidden);
  if (config.gated) part("w3", source.up, gradient.w13, true, config.hidden);
  expect_differences(layer, "w2", source.down, gradient.w2);
  if (!config.bias) return;
  part("b1", source.gate_bias, gradient.b13, false, 1);
  if (config.gated) part("b3", source.up_bias, gradient.b13, true, 1);
  expect_differences(layer, "b2", source.down_bias, gradient.b2);
}

void expect_gradients(const LayerShape& shape) {
  SCOPED_TRACE(fmt::format("score {} renormalised {} K {} of {} activation {} gated {} bias {} {}",
                           static_cast<int>(shape.score), shape.renormalize, shape.top_k,
                           shape.num_experts, to_string(shape.activation), shape.gated, shape.bias,
                           shape.given ? "given" : "routed"));
  SmallLayer layer(shape);
  const LayerGradient gradient = layer.gradient();
  expect_differences(layer, "tokens", layer.tokens, gradient.tokens);
  expect_expert_differences(layer, layer.model.config.experts, *layer.experts, gradient.experts);
  if (shape.given) {
    expect_differences(layer, "weight", layer.weight, gradient.weight);
    EXPECT_TRUE(gradient.logits.empty() && gradient.gate.empty() && gradient.router_bias.empty());
  } else {
    expect_differences(layer, "gate", layer.gate, gradient.gate);
    if (shape.router_bias) {
      expect_differences(layer, "router bias", layer.router_bias, gradient.router_bias);
    }
  }
  if (shape.beside.constant > 0) {
    expect_differences(layer, "constants", layer.constants, gradient.constant_experts);
  }
  if (shape.gating_residual) {
    expect_differences(layer, "residual", layer.residual, gradient.gating_residual);
    expect_differences(layer, "logits before", layer.previous_logits, gradient.previous_logits);
  }
  if (shape.shared) {
    expect_expert_differences(layer, layer.model.config.shared, *layer.shared, gradient.shared);
  }
  if (shape.shared_gated) {
    expect_differences(layer, "shared gate", layer.shared_gate, gradient.shared_gate);
  }
}

constexpr Score kScores[] = {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid};
constexpr Activation kActivations[] = {
    Activation::kSilu,  Activation::kGelu,          Activation::kGeluTanh, Activation::kRelu,
    Activation::kRelu2, Activation::kClampedSwiglu, Activation::kIdentity};

TEST(ReferenceBackward, EveryRuleOfTheRouterHasTheGradientsOfItsDifferences) {
  for (const Score score :
       {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid, Score::kSparseMixer}) {
    for (const bool renormalize : {true, false}) {
      for (const std::int32_t top_k : {1, 2, 8}) {
        expect_gradients({.score = score,
                          .renormalize = renormalize,
                          .scale = top_k == 2 ? 2.5F : 1.0F,
                          .num_experts = 8,
                          .top_k = top_k,
                          .router_bias = true,
                          .selection_bias = top_k == 2 && score != Score::kSparseMixer,
                          .seed = 7 + static_cast<std::uint64_t>(top_k)});
      }
    }
  }
}

TEST(ReferenceBackward, EveryActivationHasTheGradientsOfItsDifferences) {
  for (const Activation activation : kActivations) {
    for (const bool gated : {true, false}) {
      if (!gated && activation == Activation::kClampedSwiglu) continue;
      for (const bool bias : {false, true}) {
        for (std::uint64_t seed = 1; seed < 6; ++seed) {
          expect_gradients({.activation = activation, .gated = gated, .bias = bias, .seed = seed});
        }
      }
    }
  }
}

TEST(ReferenceBackward, WhatWasDroppedGivesNothingByEveryPolicy) {
  for (const DropPolicy policy :
       {DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs, DropPolicy::kBpr}) {
    for (const Score score : kScores) {
      const LayerShape shape{.score = score,
                             .renormalize = score != Score::kSoftmax,
                             .bias = true,
                             .capacity_factor = 0.5,
                             .policy = policy};
      expect_gradients(shape);
      const SmallLayer layer(shape);
      ASSERT_NE(std::count(layer.kept.begin(), layer.kept.end(), 0), 0);
      const LayerGradient gradient = layer.gradient();
      for (std::size_t i = 0; i < layer.kept.size(); ++i) {
        if (layer.kept[i] != 0) continue;
        EXPECT_EQ(gradient.weight[i].value, 0);
        EXPECT_EQ(gradient.weight[i].error, 0);
      }
    }
  }
}

TEST(ReferenceBackward, SharedExpertsAndTheirGateHaveTheGradientsOfTheirDifferences) {
  for (const bool gate : {false, true}) {
    for (const bool bias : {false, true}) {
      expect_gradients({.bias = bias, .shared = true, .shared_gated = gate});
      expect_gradients({.gated = false, .bias = bias, .shared = true, .shared_gated = gate});
    }
  }
}

TEST(ReferenceBackward, ZeroComputationExpertsHaveTheGradientsOfTheirDifferences) {
  for (const ZeroComputationExperts& beside :
       {ZeroComputationExperts{.constant = 2, .copy = 1, .zero = 1},
        ZeroComputationExperts{.constant = 3}, ZeroComputationExperts{.copy = 1, .zero = 2}}) {
    for (std::uint64_t seed = 1; seed < 4; ++seed) {
      expect_gradients({.num_experts = 2, .top_k = 3, .beside = beside, .seed = seed});
      expect_gradients({.num_experts = 2,
                        .top_k = 2,
                        .shared = true,
                        .beside = beside,
                        .gating_residual = true,
                        .capacity_factor = 0.8,
                        .seed = seed});
      expect_gradients(
          {.num_experts = 2, .top_k = 3, .given = true, .beside = beside, .seed = seed});
    }
  }
}

TEST(ReferenceBackward, AGivenRoutingHasTheGradientsOfItsWeights) {
  for (const std::int32_t top_k : {2, 3}) {
    expect_gradients({.top_k = top_k, .bias = true, .given = true});
    expect_gradients({.top_k = top_k, .given = true, .capacity_factor = 0.75});
  }
}

TEST(ReferenceBackward, ARouterOfOneExpertLearnsUnlessTheWeightIsOneForSure) {
  for (const Score score : kScores) {
    for (const bool renormalize : {true, false}) {
      SmallLayer layer({.score = score, .renormalize = renormalize, .top_k = 1});
      std::fill(layer.dlogits.begin(), layer.dlogits.end(), 0.0F);
      const bool constant = renormalize || score == Score::kTopkSoftmax;
      double largest = 0;
      for (const Bounded number : layer.gradient().gate) {
        largest = std::max(largest, std::abs(number.value) - (constant ? 0 : number.error));
      }
      EXPECT_EQ(largest, constant ? 0 : std::max(largest, 0.01))
          << static_cast<int>(score) << renormalize << largest;
    }
  }
}

TEST(ReferenceBackward, OnlyTheExpertsTakeTokensAsTheWireLeavesThem) {
  const LayerShape shape{.bias = true, .shared = true, .shared_gated = true};
  const SmallLayer layer(shape);
  SmallLayer coarse(shape);
  for (double& x : coarse.tokens) x = round_value(DType::kBF16, x);
  const LayerGradient wire = layer.gradient({.dispatch_wire = DType::kBF16});
  const auto same = [](std::span<const Bounded> a, std::span<const Bounded> b) {
    return std::equal(a.begin(), a.end(), b.begin(),
                      [](Bounded x, Bounded y) { return x.value == y.value; });
  };
  EXPECT_TRUE(same(wire.experts.w13, coarse.gradient().experts.w13));
  EXPECT_FALSE(same(wire.experts.w13, layer.gradient().experts.w13));
  EXPECT_TRUE(same(wire.shared.w13, layer.gradient().shared.w13));
  EXPECT_TRUE(same(wire.shared_gate, layer.gradient().shared_gate));
}

TEST(ReferenceBackward, WhatTheContractRoundsIsOfTheComputeType) {
  const SmallLayer layer({.bias = true});
  const ExpertMatrices matrices =
      read_expert(layer.model.config.experts, *layer.experts, 0, {.compute = DType::kBF16});
  ExpertBackward expert(layer.model.config.experts, matrices, {.compute = DType::kBF16});
  const std::vector<double> dout{1, 0, 0, 0, 0};
  (void)expert.add(std::vector{0.5, -1.0, 0.25, 1.0, -0.75}, dout, {0.3F, 0});
  const ExpertGradient gradient = expert.gradient();
  for (const Bounded dz : gradient.b13) EXPECT_EQ(round_value(DType::kBF16, dz.value), dz.value);
  for (std::size_t i = 0; i < 3; ++i) {  // dout picks the weighted activation.
    EXPECT_EQ(round_value(DType::kBF16, gradient.w2[i].value), gradient.w2[i].value);
  }
  EXPECT_NE(round_value(DType::kBF16, gradient.b2[0].value), gradient.b2[0].value);
}

TEST(ReferenceBackward, TheActivationsGradientMayBeRoundedOnlyWhereThatIsSaid) {
  const SmallLayer layer({.bias = true});
  const Precision exact{.compute = DType::kBF16};
  const ExpertMatrices matrices = read_expert(layer.model.config.experts, *layer.experts, 0, exact);
  const auto width_of_weight = [&](bool may_round) {
    Precision precision = exact;
    precision.may_round_inner_gradient = may_round;
    ExpertBackward expert(layer.model.config.experts, matrices, precision);
    return expert
        .add(std::vector{0.5, -1.0, 0.25, 1.0, -0.75}, std::vector{0.3, 1.7, -0.9, 0.2, 1.1},
             {0.3F, 0})
        .weight.error;
  };
  EXPECT_LT(width_of_weight(false), 1e-5);
  EXPECT_GT(width_of_weight(true), 1e-4);
  EXPECT_LT(width_of_weight(true), 0.05);
}

}  // namespace
}  // namespace switchyard::reference
