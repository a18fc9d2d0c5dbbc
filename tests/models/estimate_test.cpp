// What a run is said to take before it begins.
#include <gtest/gtest.h>

#include "switchyard/models/trainer.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/small_run.hpp"

namespace switchyard::models {
namespace {

TEST(TrainEstimate, FollowsTheCounts) {
  const TrainConfig config = small_run();
  const ModelCounts counts = count(config.model);
  const TrainEstimate estimate = estimate_training(config, 10, 1e9, 1e9);
  EXPECT_EQ(estimate.tokens, 10 * 4 * 16);
  EXPECT_DOUBLE_EQ(estimate.flops, counts.flops_per_token * 640);
  EXPECT_DOUBLE_EQ(estimate.bytes, counts.bytes(64) + 8 * static_cast<double>(counts.parameters));
  EXPECT_NEAR(estimate.seconds,
              estimate.flops / (kExpectedShare * 1e9) +
                  10 * 32 * static_cast<double>(counts.parameters) / 1e9,
              1e-12);
}

TEST(TrainEstimate, OfWhatAGpuDoesNotHaveIsRefused) {
  TrainConfig config = small_run();
  config.model.router = "soft-moe";
  EXPECT_GT(estimate_training(config, 1, 1e9, 1e9).bytes, 0);
  test::expect_error(ErrorCode::kUnsupported, "the router soft-moe of a model runs on a CPU", [&] {
    (void)estimate_training(config, 1, 1e9, 1e9, {.backend = Backend::kCuda});
  });
}

TEST(TrainEstimate, SaysWhatMemoryIsFor) {
  TrainConfig config = small_run();
  const auto all = static_cast<double>(count(config.model).parameters);
  for (const Backend backend : {Backend::kCpu, Backend::kCuda}) {
    const TrainEstimate kept = estimate_training(config, 1, 1e9, 1e9, {.backend = backend});
    EXPECT_DOUBLE_EQ(kept.bytes, kept.memory.total());
    EXPECT_EQ(kept.memory.gradients, 4 * all);
    EXPECT_EQ(kept.memory.moments, 8 * all);
    EXPECT_GE(kept.memory.weights, 4 * all);
    EXPECT_EQ(kept.memory.exchange, 0);
    // 64 tokens, 2 layers, 2 experts of width 8: gate and up.
    const TrainEstimate again =
        estimate_training(config, 1, 1e9, 1e9, {.backend = backend, .recompute = true});
    EXPECT_NEAR(kept.bytes - again.bytes, 4 * 64 * 2 * 2 * 2 * 8, 1);
  }
  config.compute = DType::kBF16;
  EXPECT_EQ(estimate_training(config, 1, 1e9, 1e9, {.backend = Backend::kCuda}).memory.weights,
            4 * all + 4 * double(config.model.vocabulary * config.model.hidden));
}

// What model_bench read of one H200 at 4389c01, behind its steps; CUDA's own memory is in it.
TEST(TrainEstimate, OfAGpuIsWhatOneTook) {
  struct Taken {
    const char* preset;
    std::int32_t experts;
    double bytes;
  };
  for (const Taken& one :
       {Taken{"s", 8, 5886705664.0}, {"s", 32, 9560915968.0}, {"m", 32, 25683820544.0}}) {
    const Preset& preset = find_preset(one.preset);
    TrainConfig config{.model = preset.model};
    config.model.experts = one.experts;
    config.compute = DType::kBF16;
    config.sequences = preset.sequences;
    const double estimate =
        estimate_training(config, 1, 1e9, 1e9, {.backend = Backend::kCuda}).bytes;
    EXPECT_LT(estimate, one.bytes) << one.preset;
    EXPECT_GT(estimate, 0.95 * one.bytes) << one.preset;
  }
}

TEST(TrainEstimate, HasMomentsOfWhatLearnsAlone) {
  TrainConfig config = small_run();
  const ModelCounts counts = count(config.model);
  const TrainEstimate whole = estimate_training(config, 10, 1e9, 1e9);
  config.freeze = {Group::kExperts};
  const TrainEstimate frozen = estimate_training(config, 10, 1e9, 1e9);
  const double moments = 8 * static_cast<double>(counts.routed);
  EXPECT_GT(moments, 0);
  EXPECT_DOUBLE_EQ(whole.bytes - frozen.bytes, moments);
  EXPECT_DOUBLE_EQ(whole.checkpoint_bytes - frozen.checkpoint_bytes, moments);
  config.freeze = {};
  config.model.adapters = AdapterConfig{};
  const TrainEstimate adapters = estimate_training(config, 10, 1e9, 1e9);
  EXPECT_DOUBLE_EQ(adapters.checkpoint_bytes,
                   4 * static_cast<double>(count(config.model).parameters) +
                       8 * static_cast<double>(count(config.model).adapters));
}

}  // namespace
}  // namespace switchyard::models
