// The whole model against the one in double: logits, loss, and gradients against finite differences
// of that loss.
#include <gtest/gtest.h>

#include "tests/models/small_model.hpp"

namespace switchyard::test {
namespace {

using models::Model;
using models::ModelConfig;
using models::ParameterTensor;
using models::QkNorm;
using models::StepStats;
using models::TensorPart;

/// Larger values than at the start of a training: every part then has a say.
void make_rough(Model& model) {
  Random random(5);
  for (const ParameterTensor& tensor : model.parameters()) {
    for (std::int64_t i = 0; i < tensor.size(); ++i) {
      const float noise = static_cast<float>(random.normal());
      tensor.value[i] = tensor.shape.size() == 1 ? 1 + 0.2F * noise : 0.25F * noise;
    }
  }
  model.parameters_changed();
}

/// Three numbers of each part: their gradients against differences of the loss in double.
void expect_gradients(Model& model, const Text& text, bool renormalize = true) {
  make_rough(model);
  DoubleModel in_double(model, renormalize);
  const auto positions = static_cast<std::size_t>(text.positions);
  const Doubles want = in_double.logits(text.tokens, positions);
  const std::vector<float> have = logits(model, text);
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(double{have[i]}, want[i], 2e-5 * (1 + std::abs(want[i]))) << i;
  }
  StepStats stats;
  step(model, text, &stats);
  EXPECT_NEAR(stats.loss, in_double.loss(text.tokens, text.targets, positions), 1e-5);

  Random random(6);
  for (const ParameterTensor& tensor : model.parameters()) {
    double norm = 0;
    for (std::int64_t i = 0; i < tensor.size(); ++i) {
      norm += double{tensor.gradient[i]} * double{tensor.gradient[i]};
    }
    norm = std::sqrt(norm / static_cast<double>(tensor.size()));
    EXPECT_GT(norm, 0) << tensor.name;
    for (const TensorPart& part : tensor.parts) {
      for (int n = 0; n < 3; ++n) {
        const std::int64_t i = random.between(0, part.size() - 1);
        double& number = in_double.at(part.name)[static_cast<std::size_t>(i)];
        const double at = number, h = 1e-6;
        number = at + h;
        const double above = in_double.loss(text.tokens, text.targets, positions);
        number = at - h;
        const double below = in_double.loss(text.tokens, text.targets, positions);
        number = at;
        EXPECT_NEAR(double{tensor.gradient[part.offset + i]}, (above - below) / (2 * h),
                    1e-4 * norm + 2e-7)
            << part.name << " number " << i;
      }
    }
  }
}

TEST(ModelGradient, IsThatOfGroupedHeadsNormalisedByHeadWithRouterLosses) {
  ModelConfig config = small_config();
  config.losses = {.balance = 0.3, .z = 0.05};
  Model model(config);
  expect_gradients(model, Text(2, 17, config.vocabulary));
}

TEST(ModelGradient, IsThatOfATiedModelNormalisedAsAWholeWithADenseLayerFirst) {
  ModelConfig config = small_config();
  config.tied = true, config.qk_norm = QkNorm::kWhole;
  config.first_dense = 1, config.dense_inner = 23;
  Model model(config);
  expect_gradients(model, Text(3, 7, config.vocabulary));
}

TEST(ModelGradient, IsThatOfSharedExpertsAndWeightsThatAreNotRenormalised) {
  ModelConfig config = small_config();
  config.qk_norm = QkNorm::kNone, config.kv_heads = 4;
  config.shared_inner = 11, config.shared_gated = true, config.router = "top-k:renormalize=no";
  Model model(config);
  expect_gradients(model, Text(1, 29, config.vocabulary), false);
}

TEST(ModelGradient, IsThatOfChainsWithLossesOfEachIteration) {
  for (const char* router :
       {"chain:iterations=2", "chain:iterations=2,inner-residual=no,outer-residual=yes",
        "chain:iterations=3,top-k=1,outer-residual=yes"}) {
    SCOPED_TRACE(router);
    ModelConfig config = small_config();
    config.router = router;
    config.top_k = *models::taken_top_k(config);
    config.shared_inner = 7, config.qk_norm = QkNorm::kNone;
    config.losses = {.balance = 0.3, .z = 0.05};
    Model model(config);
    expect_gradients(model, Text(2, 11, config.vocabulary));
  }
}

ModelConfig soft_config(const char* router) {
  ModelConfig config = small_config();
  config.router = router;
  config.first_dense = 1, config.dense_inner = 7;
  return config;
}

/// Sequences of whole groups, and with tokens behind them.
TEST(ModelGradient, IsThatOfSoftMoeOfSequencesAndOfGroupsBefore) {
  for (const char* router : {"soft-moe", "soft-moe:slots=3", "soft-moe:slots=2,normalize=no",
                             "soft-moe:slots=3,group=4,causal=yes",
                             "soft-moe:slots=1,group=5,causal=yes,normalize=no"}) {
    for (const std::int64_t positions : {12, 11, 6}) {
      SCOPED_TRACE(std::string(router) + " " + std::to_string(positions));
      Model model(soft_config(router));
      expect_gradients(model, Text(2, positions, model.config().vocabulary));
    }
  }
  Model model(soft_config("soft-moe:slots=3"));
  expect_gradients(model, Text(3, 1, model.config().vocabulary));
}

TEST(ModelGradient, OfSequencesShorterThanACausalGroupReachesNoExpert) {
  Model model(soft_config("soft-moe:slots=2,group=4,causal=yes"));
  make_rough(model);
  const Text text(3, 4, model.config().vocabulary);
  for (const ParameterTensor& tensor : model.parameters()) {
    std::fill_n(tensor.gradient, tensor.size(), 5.0F);
  }
  StepStats stats;
  EXPECT_NEAR(step(model, text, &stats), DoubleModel(model).loss(text.tokens, text.targets, 4),
              1e-5);
  EXPECT_EQ(stats.layers.at(0).counts, std::vector<std::int64_t>(5, 0));
  for (const ParameterTensor& tensor : model.parameters()) {
    if (!tensor.name.starts_with("model.layers.1.mlp.")) continue;
    EXPECT_EQ(std::count(tensor.gradient, tensor.gradient + tensor.size(), 0.0F), tensor.size())
        << tensor.name;
  }
}

TEST(ModelGradient, IsThatOfDenseLayersAlone) {
  ModelConfig config = small_config();
  config.first_dense = 2, config.dense_inner = 17, config.experts = 0;
  Model model(config);
  expect_gradients(model, Text(2, 9, config.vocabulary));
}

TEST(ModelGradient, OfSequencesOfOnePosition) {
  Model model(small_config());
  make_rough(model);
  const Text text(7, 1, 37);
  DoubleModel in_double(model);
  EXPECT_NEAR(step(model, text), in_double.loss(text.tokens, text.targets, 1), 1e-5);
}

TEST(ModelGradient, OfAnExpertWithoutTokensIsZeroAndNothingIsLeftThere) {
  ModelConfig config = small_config();
  config.losses = {};
  Model model(config);
  const ParameterTensor* gate = nullptr;
  for (const ParameterTensor& tensor : model.parameters()) {
    if (tensor.name == "model.layers.0.mlp.gate.weight") gate = &tensor;
    std::fill_n(tensor.gradient, tensor.size(), 5.0F);
  }
  ASSERT_NE(gate, nullptr);
  // Expert 3 is the negative of the sum of the others: at least two of them are above it.
  for (std::int64_t h = 0; h < config.hidden; ++h) {
    float sum = 0;
    for (const int e : {0, 1, 2, 4}) sum += gate->value[e * config.hidden + h];
    gate->value[3 * config.hidden + h] = sum / 4;
  }
  model.parameters_changed();
  StepStats stats;
  step(model, Text(1, 3, config.vocabulary), &stats);
  int empty = 0;
  for (const ParameterTensor& tensor : model.parameters()) {
    for (const TensorPart& part : tensor.parts) {
      for (int e = 0; e < config.experts; ++e) {
        for (int l = 0; l < config.layers; ++l) {
          const std::string prefix =
              "model.layers." + std::to_string(l) + ".mlp.experts." + std::to_string(e) + ".";
          if (!part.name.starts_with(prefix)) continue;
          if (stats.layers[std::size_t(l)].counts[std::size_t(e)] > 0) continue;
          ++empty;
          for (std::int64_t i = 0; i < part.size(); ++i) {
            ASSERT_EQ(tensor.gradient[part.offset + i], 0) << part.name;
          }
        }
      }
    }
  }
  EXPECT_GT(empty, 0);
}

TEST(ModelGradient, ReachesTheRouterOfEveryTrainableKind) {
  for (const char* const router :
       {"top-k", "top-k:score=sigmoid", "switch", "gshard", "noisy-top-k", "v-moe", "adamoe",
        "expert-choice", "expert-threshold", "top-p", "relu", "chain"}) {
    SCOPED_TRACE(router);
    ModelConfig config = small_config();
    config.router = router;
    config.sequence = 24;
    Model model(config);
    const Text text(2, 24, config.vocabulary);
    StepStats stats;
    const double loss = step(model, text, &stats);
    EXPECT_TRUE(std::isfinite(loss));
    for (const ParameterTensor& tensor : model.parameters()) {
      if (tensor.name.find("mlp.gate.") == std::string::npos) continue;
      float largest = 0;
      for (std::int64_t i = 0; i < tensor.size(); ++i) {
        largest = std::max(largest, std::abs(tensor.gradient[i]));
      }
      EXPECT_GT(largest, 0) << tensor.name;
    }
    model.update_routers(stats);
    model.parameters_changed();
    EXPECT_TRUE(std::isfinite(step(model, text, &stats)));
  }
}

/// Small ones of every kind, beside which nothing is frozen.
std::vector<ModelConfig> configs_with_adapters() {
  std::vector<ModelConfig> configs;
  for (const models::AdapterConfig& adapters :
       {models::AdapterConfig{.num_adapters = 4, .top_k = 2, .rank = 3, .alpha = 2},
        {.num_adapters = 3, .top_k = 2, .renormalize = true, .rank = 5, .alpha = 7},
        {.num_adapters = 2, .rank = 2, .alpha = 3},
        {.kind = PerftKind::kEmbedded, .num_adapters = 5, .rank = 3, .alpha = 2},
        {.kind = PerftKind::kDense, .num_adapters = 3, .rank = 4, .alpha = 2},
        {.kind = PerftKind::kShared, .num_adapters = 1, .rank = 8, .alpha = 4}}) {
    ModelConfig config = small_config();
    config.adapters = adapters;
    configs.push_back(config);
  }
  return configs;
}

TEST(ModelGradient, IsThatOfAdaptersOfEveryKindAndOfAllBesideThem) {
  for (const ModelConfig& config : configs_with_adapters()) {
    SCOPED_TRACE(to_string(config.adapters->kind));
    Model model(config, {.num_threads = 2});
    expect_gradients(model, Text(2, 13, config.vocabulary));
  }
}

TEST(ModelGradient, IsThatOfAdaptersBesideADenseLayerSharedExpertsAndRouterLosses) {
  ModelConfig config = small_config();
  config.layers = 3, config.first_dense = 1, config.dense_inner = 11;
  config.shared_inner = 7, config.shared_gated = true, config.router = "top-k:renormalize=no";
  config.losses = {.balance = 0.3, .z = 0.05};
  config.adapters =
      models::AdapterConfig{.kind = PerftKind::kEmbedded, .num_adapters = 5, .rank = 3};
  Model model(config, {.recompute = true});
  expect_gradients(model, Text(2, 11, config.vocabulary), false);
}

void expect_sum_of_halves(const ModelConfig& config) {
  Model model(config);
  make_rough(model);
  Text whole(2, 16, config.vocabulary);
  for (std::int32_t& target : whole.targets) target = std::max(target, 0);
  StepStats stats, parts;
  const double loss = step(model, whole, &stats);
  const std::vector<float> want = gradients(model);
  double sum = 0;
  for (std::int64_t half = 0; half < 2; ++half) {
    const std::int32_t* const x = whole.tokens.data() + half * 16;
    const std::int32_t* const y = whole.targets.data() + half * 16;
    sum += model.loss_and_gradients({.tokens = {x, {1, 16}},
                                     .targets = {y, {1, 16}},
                                     .scale = 0.5,
                                     .accumulate = half == 1,
                                     .first_token = half * 16,
                                     .stats = &parts});
  }
  EXPECT_NEAR(sum / 2, loss, 1e-6);
  EXPECT_EQ(parts.targets, stats.targets);
  EXPECT_EQ(parts.calls, 2);
  EXPECT_EQ(parts.layers[1].counts, stats.layers[1].counts);
  EXPECT_NEAR(parts.loss, stats.loss, 1e-6);
  const std::vector<float> have = gradients(model);
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(have[i], want[i], 2e-6) << i;
}

TEST(ModelGradient, OfTwoHalvesAccumulatedIsThatOfTheWholeBatch) {
  expect_sum_of_halves(small_config());
  for (const ModelConfig& config : configs_with_adapters()) {
    SCOPED_TRACE(to_string(config.adapters->kind));
    expect_sum_of_halves(config);
  }
}

}  // namespace
}  // namespace switchyard::test
