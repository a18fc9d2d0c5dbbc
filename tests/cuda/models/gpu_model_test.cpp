// Whole models on a GPU beside the same ones on a CPU: logits, losses, gradients, bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "testkit/expect_error.hpp"
#include "tests/cuda/models/gpu_models.hpp"

namespace switchyard::models {
namespace {

using test::expect_error;
using TestText = test::Text;

/// |a - b| / |b| of a tensor's gradients.
double distance(const ParameterTensor& a, const ParameterTensor& b) {
  double apart = 0, all = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) {
    const double x = a.gradient[i], y = b.gradient[i];
    apart += (x - y) * (x - y);
    all += y * y;
  }
  return std::sqrt(apart / (all + 1e-30));
}

struct Bounds {
  double logits, loss;
  double gradients;  ///< Of a tensor as a whole,
  double each;       ///< and of each of its elements, as expect_gradient_near() has it.
};

void expect_like_the_cpu(const ModelConfig& config, DType compute, const Bounds& bounds,
                         std::int64_t sequences = 3, std::int64_t length = 71) {
  SCOPED_TRACE(testing::Message() << config.router << " " << to_string(compute));
  Model cpu(config, {.num_threads = 2, .seed = 3});
  Model gpu(config, on_gpu(compute));
  make_rough(cpu, 0.1F);
  make_rough(gpu, 0.1F);
  const TestText text(sequences, length, config.vocabulary);
  const std::vector<float> want = test::logits(cpu, text), have = test::logits(gpu, text);
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(have[i], want[i], bounds.logits * (1 + std::abs(want[i]))) << i;
  }
  StepStats of_cpu, of_gpu;
  const double loss = test::step(cpu, text, &of_cpu);
  EXPECT_NEAR(test::step(gpu, text, &of_gpu), loss, bounds.loss);
  EXPECT_NEAR(of_gpu.loss, of_cpu.loss, bounds.loss);
  EXPECT_EQ(of_gpu.targets, of_cpu.targets);
  ASSERT_EQ(of_gpu.layers.size(), of_cpu.layers.size());
  for (std::size_t l = 0; l < of_cpu.layers.size(); ++l) {
    EXPECT_EQ(of_gpu.layers[l].tokens, of_cpu.layers[l].tokens);
    EXPECT_EQ(of_gpu.layers[l].layer, of_cpu.layers[l].layer);
    EXPECT_NEAR(of_gpu.layers[l].losses.z, of_cpu.layers[l].losses.z,
                bounds.loss * (1 + of_cpu.layers[l].losses.z));
    if (compute != DType::kF32) continue;
    EXPECT_EQ(of_gpu.layers[l].counts, of_cpu.layers[l].counts);
    EXPECT_EQ(of_gpu.layers[l].counts_kept, of_cpu.layers[l].counts_kept);
  }
  for (std::size_t i = 0; i < cpu.parameters().size(); ++i) {
    const ParameterTensor &have_of = gpu.parameters()[i], &want_of = cpu.parameters()[i];
    const auto size = static_cast<std::size_t>(want_of.size());
    test::expect_gradient_near(want_of.name, {have_of.gradient, size}, {want_of.gradient, size},
                               want_of.shape.back(), bounds.each);
    EXPECT_LE(distance(have_of, want_of), bounds.gradients) << want_of.name;
  }
  std::vector<float> nll(text.tokens.size()), nll_want(nll.size());
  const double sum = cpu.evaluate(text.x(), text.y(), {nll_want.data(), text.x().shape});
  EXPECT_NEAR(gpu.evaluate(text.x(), text.y(), {nll.data(), text.x().shape}), sum,
              bounds.loss * double(nll.size()));
  // A target's is the logarithm of a sum of exponentials less its logit.
  float most = 0;
  for (const float logit : want) most = std::max(most, std::abs(logit));
  for (std::size_t i = 0; i < nll.size(); ++i) {
    ASSERT_NEAR(nll[i], nll_want[i], 2 * bounds.logits * (1 + double{most})) << i;
  }
}

constexpr Bounds kF32{.logits = 2e-4, .loss = 2e-5, .gradients = 1e-3, .each = 1e-3};
/// A term of a gradient is rounded to bf16, by 2^-9 at most, some 30 times on its way through both
/// layers and back: off by 0.011 of itself where they cancel as they may, at worst by 0.06, and the
/// errors of terms of either sign come to as much of a gradient, with a few that stray. Every
/// expert has every token, so that no choice can turn.
constexpr Bounds kBf16{.logits = 0.1, .loss = 0.02, .gradients = 0.08, .each = 0.15};

TEST(ModelOnGpu, SmallModelsInF32AreThoseOfTheCpu) {
  expect_like_the_cpu(gpu_config(), DType::kF32, kF32, 2, 9);
}
TEST(ModelOnGpu, SmallModelsInBf16AreNearThoseOfTheCpu) {
  ModelConfig config = gpu_config();
  config.top_k = config.experts;
  expect_like_the_cpu(config, DType::kBF16, kBf16, 2, 9);
}
TEST(ModelOnGpu, ModelsInF32AreThoseOfTheCpu) {
  expect_like_the_cpu(gpu_config(), DType::kF32, kF32);
  ModelConfig tied = gpu_config();
  tied.tied = true;
  tied.qk_norm = QkNorm::kNone;
  tied.head_dim = 24;
  expect_like_the_cpu(tied, DType::kF32, kF32);
  ModelConfig dense = gpu_config();
  dense.first_dense = 1;
  dense.dense_inner = 96;
  dense.shared_inner = 32;
  dense.shared_gated = true;
  expect_like_the_cpu(dense, DType::kF32, kF32);
  ModelConfig full = gpu_config();
  full.capacity_factor = 1.0;
  full.losses = {};
  // Evaluation drops nothing, so both of a GPU's layers are in use.
  expect_like_the_cpu(full, DType::kF32, kF32);
}
TEST(ModelOnGpu, RoutersInF32AreThoseOfTheCpu) {
  for (const char* router : {"hash", "expert-choice", "gshard"}) {
    ModelConfig config = gpu_config();
    config.router = router;
    config.losses = {};
    expect_like_the_cpu(config, DType::kF32, kF32, 2, 80);
  }
  // With losses of each iteration; once with room that not all find.
  ModelConfig chain = gpu_config();
  chain.router = "chain:iterations=3,top-k=1,outer-residual=yes";
  chain.top_k = 3;
  expect_like_the_cpu(chain, DType::kF32, kF32, 2, 80);
  chain.router = "chain:iterations=2,top-k=2";
  chain.top_k = 4;
  chain.capacity_factor = 1.0;
  expect_like_the_cpu(chain, DType::kF32, kF32, 2, 80);
}
TEST(ModelOnGpu, ModelsInBf16AreNearThoseOfTheCpu) {
  ModelConfig config = gpu_config();
  config.top_k = config.experts;
  for (const std::int64_t dim : {32, 64, 128}) {
    config.head_dim = dim;
    expect_like_the_cpu(config, DType::kBF16, kBf16);
  }
}

TEST(ModelOnGpu, SmallCallsHaveTheSameBitsInEveryRunAndAccumulate) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const TestText text(3, 33, 37);
    Model first(gpu_config(), on_gpu(compute)), second(gpu_config(), on_gpu(compute));
    ModelOptions lean = on_gpu(compute);
    lean.recompute = true;
    Model recomputed(gpu_config(), lean);
    test::step(first, text);
    test::step(second, text);
    test::step(recomputed, text);
    const std::vector<float> once = test::gradients(first);
    EXPECT_EQ(once, test::gradients(second));
    EXPECT_EQ(once, test::gradients(recomputed));
    StepStats stats;
    first.loss_and_gradients({.tokens = text.x(), .targets = text.y(), .stats = &stats});
    first.loss_and_gradients(
        {.tokens = text.x(), .targets = text.y(), .accumulate = true, .stats = &stats});
    const std::vector<float> twice = test::gradients(first);
    EXPECT_EQ(stats.calls, 2);
    EXPECT_EQ(stats.layers.at(0).tokens, 2 * text.x().size());
    for (std::size_t i = 0; i < once.size(); ++i) {
      ASSERT_NEAR(twice[i], 2 * once[i], 1e-5 * std::abs(once[i]) + 1e-6) << i;
    }
  }
}

TEST(ModelOnGpu, SmallLossAtTheStartIsThatOfGuessing) {
  Model model(gpu_config(), on_gpu(DType::kBF16));
  EXPECT_NEAR(test::step(model, TestText(2, 64, 37)), std::log(37.0), 0.05);
}

TEST(ModelOnGpu, SmallWhatItDoesNotDoIsRefusedByName) {
  const auto refused = [](const ModelConfig& config, DType compute, const char* words) {
    expect_error(ErrorCode::kUnsupported, words, [&] { Model(config, on_gpu(compute)); });
  };
  ModelConfig config = gpu_config();
  refused(config, DType::kF16, "f32 or bf16, not in f16");
  config.hidden = 60;
  refused(config, DType::kF32, "hidden=60");
  config = gpu_config();
  config.head_dim = 24;
  refused(config, DType::kBF16, "head_dim=24");
  config = gpu_config();
  config.qk_norm = QkNorm::kWhole;
  refused(config, DType::kF32, "qk_norm whole");
  config = gpu_config();
  config.router = "relu";
  refused(config, DType::kF32, "relu");
}

}  // namespace
}  // namespace switchyard::models
