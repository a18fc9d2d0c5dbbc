// What a model promises of its bits, and what a training of a few steps must show.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "testkit/expect_error.hpp"
#include "tests/models/small_model.hpp"

namespace switchyard::test {
namespace {

using models::AdamW;
using models::Cache;
using models::Model;
using models::ModelConfig;
using models::ModelOptions;
using models::StepStats;

/// Parameters and losses of a few steps.
struct Training {
  std::vector<float> values;
  std::vector<double> losses;
  bool operator==(const Training&) const = default;
};
Training train(const ModelConfig& config, const ModelOptions& options, int steps = 3) {
  Model model(config, options);
  AdamW optimizer(model.parameters(), {});
  Training run;
  for (int n = 0; n < steps; ++n) {
    const Text text(3, 23, config.vocabulary, std::uint64_t(n));
    StepStats stats;
    run.losses.push_back(model.loss_and_gradients(
        {.tokens = text.x(), .targets = text.y(), .step = std::uint64_t(n), .stats = &stats}));
    run.losses.push_back(optimizer.step(1e-2, &model.pool()));
    model.update_routers(stats);
    model.parameters_changed();
  }
  run.values = test::values(model);
  return run;
}

TEST(ModelBits, AreTheSameForAnyNumberOfThreadsInEveryRunAndWithRecomputation) {
  ModelConfig config = small_config();
  config.losses = {.balance = 0.1, .z = 0.01};
  config.first_dense = 1, config.dense_inner = 30, config.shared_inner = 10;
  config.router = "noisy-top-k", config.capacity_factor = 1.0;
  const Training first = train(config, {.num_threads = 1, .seed = 3});
  EXPECT_EQ(train(config, {.num_threads = 1, .seed = 3}), first);
  EXPECT_EQ(train(config, {.num_threads = 2, .seed = 3}), first);
  EXPECT_EQ(train(config, {.num_threads = 3, .seed = 3}), first);
  EXPECT_EQ(train(config, {.num_threads = 2, .seed = 3, .recompute = true}), first);
  EXPECT_NE(train(config, {.num_threads = 1, .seed = 4}).values, first.values);
}

TEST(ModelBits, OfSoftMoeAreTheSameForAnyNumberOfThreadsAndWithRecomputation) {
  for (const char* router : {"soft-moe:slots=3", "soft-moe:slots=2,group=5,causal=yes"}) {
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      ModelConfig config = small_config();
      config.router = router;
      const Training first = train(config, {.num_threads = 1, .seed = 3, .compute = compute});
      EXPECT_EQ(train(config, {.num_threads = 3, .seed = 3, .compute = compute}), first);
      EXPECT_EQ(train(config, {.num_threads = 2, .seed = 3, .compute = compute, .recompute = true}),
                first);
      EXPECT_NE(train(config, {.seed = 4, .compute = compute}).values, first.values);
      EXPECT_TRUE(std::isfinite(first.losses.back()));
    }
  }
}

TEST(ModelBits, OfSharedTensorsAreTheSameInModelsWithOtherExperts) {
  ModelConfig config = small_config();
  Model few(config, {.seed = 9});
  config.experts = 8;
  Model many(config, {.seed = 9});
  int equal = 0;
  for (const models::ParameterTensor& a : few.parameters()) {
    for (const models::ParameterTensor& b : many.parameters()) {
      if (a.name != b.name) continue;
      // Of experts the first ones.
      ASSERT_LE(a.size(), b.size());
      EXPECT_TRUE(std::equal(a.value, a.value + a.size(), b.value)) << a.name;
      ++equal;
    }
  }
  EXPECT_EQ(equal, std::ssize(few.parameters()));
}

TEST(ModelBits, OfCachedDecodingAreThoseOfTheForward) {
  for (const char* const router :
       {"top-k", "hash", "top-p", "soft-moe:slots=2,group=8,causal=yes",
        "soft-moe:slots=3,group=1,causal=yes", "soft-moe:group=40,causal=yes"}) {
    ModelConfig config = small_config();
    config.router = router;
    config.first_dense = 1, config.dense_inner = 14;
    config.capacity_factor = config.router == "top-k" ? std::optional(1.0) : std::nullopt;
    Model model(config, {.num_threads = 2});
    const Text text(2, 41, config.vocabulary);
    const std::vector<float> want = logits(model, text);
    const std::int64_t vocabulary = config.vocabulary;
    Cache cache = model.make_cache(2, 41);
    std::int64_t done = 0;
    for (const std::int64_t n : {1, 7, 1, 1, 31}) {  // a prompt in pieces, tokens one by one
      Ids ids;
      for (std::int64_t b = 0; b < 2; ++b) {
        const auto first = text.tokens.begin() + b * 41 + done;
        ids.insert(ids.end(), first, first + n);
      }
      std::vector<float> have(std::size_t(2 * n * vocabulary));
      model.decode({ids.data(), {2, n}}, cache, {have.data(), {2 * n, vocabulary}});
      for (std::int64_t b = 0; b < 2; ++b) {
        EXPECT_TRUE(std::equal(have.begin() + b * n * vocabulary,
                               have.begin() + (b + 1) * n * vocabulary,
                               want.begin() + (b * 41 + done) * vocabulary))
            << router << " behind " << done;
      }
      done += n;
      EXPECT_EQ(cache.length(), done);
    }
    // The last one again, and the logits behind it alone.
    cache.truncate(39);
    std::vector<float> last(std::size_t(2 * vocabulary));
    const Ids two = {text.tokens[39], text.tokens[40], text.tokens[80], text.tokens[81]};
    model.decode({two.data(), {2, 2}}, cache, {last.data(), {2, vocabulary}});
    EXPECT_TRUE(
        std::equal(last.begin(), last.begin() + vocabulary, want.begin() + 40 * vocabulary));
    expect_error(ErrorCode::kInvalidArgument, "the cache has room for 41", [&] {
      model.decode({two.data(), {2, 2}}, cache, {last.data(), {2, vocabulary}});
    });
  }
}

TEST(ModelCompute, Bf16RoundsWhatDenseProductsTakeAndF16LeavesThemAlone) {
  // Experts that give nothing: what differs is of the dense products.
  const Text text(2, 9, 37);
  const auto of = [&](DType compute) {
    Model model(small_config(), {.compute = compute});
    for (const models::ParameterTensor& tensor : model.parameters()) {
      if (tensor.name.ends_with("experts.w2")) std::fill_n(tensor.value, tensor.size(), 0.0F);
    }
    model.parameters_changed();
    return logits(model, text);
  };
  const std::vector<float> want = of(DType::kF32), rounded = of(DType::kBF16);
  EXPECT_EQ(of(DType::kF16), want);
  EXPECT_NE(rounded, want);
  float largest = 0;
  for (const float logit : want) largest = std::max(largest, std::abs(logit));
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(rounded[i], want[i], 0.05F * largest) << i;
  }
}

TEST(ModelTraining, BeginsAtTheLossOfKnowingNothing) {
  for (const char* const name : {"smoke", "cpu-10min"}) {
    const models::Preset& preset = models::find_preset(name);
    Model model(preset.model, {.num_threads = 2});
    const Text text(1, 64, preset.model.vocabulary);
    const double nothing = std::log(static_cast<double>(preset.model.vocabulary));
    EXPECT_NEAR(step(model, text), nothing, 0.05 * nothing) << name;
  }
}

TEST(ModelTraining, LearnsOneBatchByHeart) {
  ModelConfig config = small_config();
  config.losses.balance = 0.01;
  Model model(config);
  AdamW optimizer(model.parameters(), {.weight_decay = 0});
  const Text text(2, 24, config.vocabulary);
  double loss = 0;
  for (int n = 0; n < 120; ++n) {
    loss = step(model, text);
    optimizer.step(1e-2, &model.pool());
    model.parameters_changed();
  }
  EXPECT_LT(loss, 0.05);
  std::vector<float> nll(text.tokens.size());
  const double sum = model.evaluate(text.x(), text.y(), {nll.data(), {2, 24}});
  EXPECT_LT(sum / 44, 0.05);
}

TEST(ModelTraining, EvaluationSumsTheLossesOfItsTargets) {
  ModelConfig config = small_config();
  config.capacity_factor = 0.5;  // of training alone
  Model model(config);
  const Text text(2, 24, config.vocabulary);
  std::vector<float> nll(text.tokens.size());
  const double sum = model.evaluate(text.x(), text.y(), {nll.data(), {2, 24}});
  const std::vector<float> all = logits(model, text);
  const Doubles want = in_double::nll(Doubles(all.begin(), all.end()), text.targets, 37);
  double expected = 0;
  for (std::size_t i = 0; i < nll.size(); ++i) {
    EXPECT_NEAR(double{nll[i]}, want[i], 1e-5) << i;
    expected += want[i];
  }
  EXPECT_NEAR(sum, expected, 1e-4);
  StepStats stats;
  step(model, text, &stats);
  std::int64_t all_rows = 0, kept = 0;
  for (const auto& layer : stats.layers) {
    for (const std::int64_t n : layer.counts) all_rows += n;
    for (const std::int64_t n : layer.counts_kept) kept += n;
  }
  EXPECT_EQ(all_rows, 2 * 48 * 2);
  EXPECT_LT(kept, all_rows);
  EXPECT_EQ(stats.layers[0].tokens, 48);
}

TEST(ModelTraining, SelectionBiasesFollowTheCountsAndChooseInTheNextStep) {
  ModelConfig config = small_config();
  config.router = "top-k:score=sigmoid", config.bias_rate = 0.01;
  Model model(config);
  ASSERT_EQ(model.buffers().size(), 2U);
  EXPECT_EQ(model.buffers()[0].name, "model.layers.0.mlp.gate.e_score_correction_bias");
  StepStats stats;
  step(model, Text(2, 24, config.vocabulary), &stats);
  model.update_routers(stats);
  const auto& counts = stats.layers[0].counts;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    const float bias = model.buffers()[0].value[e];
    EXPECT_FLOAT_EQ(bias, 5 * counts[e] < 96 ? 0.01F : -0.01F) << e;
  }
}

TEST(ModelErrors, NameTheTensorAndTheNumberThatIsNotFinite) {
  Model model(small_config(), {.num_threads = 2});
  EXPECT_FALSE(find_non_finite(model.parameters(), false).has_value());
  for (const models::ParameterTensor& tensor : model.parameters()) {
    if (tensor.name != "model.layers.1.mlp.experts.w13") continue;
    // Expert 3's up matrix begins behind three experts and its own gate.
    tensor.value[(2 * 3 + 1) * 9 * 20 + 7] = std::numeric_limits<float>::quiet_NaN();
  }
  const auto found = find_non_finite(model.parameters(), false, &model.pool());
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->tensor, "model.layers.1.mlp.experts.3.up_proj.weight");
  EXPECT_EQ(found->index, 7);
  EXPECT_TRUE(std::isnan(found->value));
  model.parameters()[0].gradient[5] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(find_non_finite(model.parameters(), true)->tensor, "model.embed_tokens.weight");
}

TEST(ModelErrors, NameWhatIsWrongWithACall) {
  Model model(small_config());
  std::vector<float> out(37);
  const auto forward = [&](std::int32_t id) {
    model.forward({&id, {1, 1}}, {out.data(), {1, 37}});
  };
  expect_error(ErrorCode::kInvalidArgument, "tokens[0][0] is 37, want 0 to 36",
               [&] { forward(37); });
  expect_error(ErrorCode::kInvalidArgument, "tokens[0][0] is -1", [&] { forward(-1); });
  const Text text(1, 49, 37);
  expect_error(ErrorCode::kInvalidArgument, "49 positions exceed the model's sequence of 48",
               [&] { step(model, text); });
  ModelConfig config = small_config();
  config.router = "expert-choice";
  Model choice(config);
  Cache cache = choice.make_cache(1, 4);
  const std::int32_t id = 1;
  expect_error(ErrorCode::kUnsupported, "expert-choice", [&] {
    choice.decode({&id, {1, 1}}, cache, {out.data(), {1, 37}});
  });
}

}  // namespace
}  // namespace switchyard::test
