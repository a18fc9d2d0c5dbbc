// The noise of routers on a GPU, and the way back of those other than top-k, against the CPU.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "switchyard/backward.hpp"
#include "testkit/expect_error.hpp"
#include "tests/cuda/routers/case.hpp"

namespace switchyard {
namespace {

using namespace test;

/// Noise as both devices draw it. @param cols  Of tokens, or of logits.
struct NoiseCall {
  std::int64_t num_tokens = 0;
  std::int64_t cols = 0;
  RouterNoise noise{};
  DType dtype = DType::kF32;
  std::vector<float> values{}, noise_logits{};
  bool in_place = false;
  RouteRequest request{.seed = 11, .step = 5, .layer = 2, .first_token = 1000, .training = true};

  NoiseCall(RouterNoise::Kind kind, float size, std::int64_t tokens, std::int64_t columns)
      : num_tokens(tokens), cols(columns), noise{.kind = kind, .size = size} {
    values = random_floats(tokens * columns, 4);
    if (kind == RouterNoise::Kind::kLearned) noise_logits = random_floats(tokens * columns, 6, 4);
  }

  [[nodiscard]] std::vector<float> run(Backend backend) const {
    const std::vector<std::byte> tokens = stored_as(dtype, values);
    std::vector<float> out = values;
    NoiseArgs args{.noise = noise, .request = request, .execution = {.backend = backend}};
    const bool jitters = noise.kind == RouterNoise::Kind::kInputJitter;
    const bool reads = jitters && !in_place;
    if (backend == Backend::kCpu) {
      (jitters ? args.jittered : args.logits) = Matrix<float>{out.data(), {num_tokens, cols}};
      if (reads) args.tokens = {tokens.data(), dtype, num_tokens, cols};
      args.noise_logits = {noise_logits.data(), {num_tokens, cols}};
      add_noise(args);
      return out;
    }
    const DeviceArray<std::byte> of_tokens(tokens);
    const DeviceArray<float> of_noise(noise_logits), device(out);
    if (reads) device.fill(0xff);
    (jitters ? args.jittered : args.logits) = device.matrix(num_tokens, cols);
    if (reads) args.tokens = {of_tokens.data(), dtype, num_tokens, cols};
    args.noise_logits = {of_noise.data(), {num_tokens, cols}};
    add_noise(args);
    return device.get();
  }
};

TEST(NoiseOnGpu, SmallJitterHasTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t hidden : {1, 3, 8, 129}) {
      NoiseCall call(RouterNoise::Kind::kInputJitter, 0.1F, 37, hidden);
      call.dtype = dtype;
      EXPECT_EQ(call.run(Backend::kCuda), call.run(Backend::kCpu)) << to_string(dtype) << hidden;
    }
  }
  NoiseCall gradient(RouterNoise::Kind::kInputJitter, 0.3F, 20, 14);
  gradient.in_place = true;
  EXPECT_EQ(gradient.run(Backend::kCuda), gradient.run(Backend::kCpu));
  EXPECT_TRUE(NoiseCall(RouterNoise::Kind::kInputJitter, 0.3F, 0, 8).run(Backend::kCuda).empty());
}

TEST(NoiseOnGpu, SmallNormalNumbersHaveTheBitsOfTheCpu) {
  for (const std::int64_t experts : {1, 2, 7, 64, 130}) {
    NoiseCall call(RouterNoise::Kind::kLogits, 1.0F, 300, experts);
    EXPECT_EQ(call.run(Backend::kCuda), call.run(Backend::kCpu)) << experts;
    call.values.assign(call.values.size(), 0.0F);
    EXPECT_EQ(call.run(Backend::kCuda), call.run(Backend::kCpu)) << experts;
  }
}

TEST(NoiseOnGpu, AMillionNormalNumbersHaveTheBitsOfTheCpu) {
  NoiseCall call(RouterNoise::Kind::kLogits, 1.0F, 8192, 128);
  call.values.assign(call.values.size(), 0.0F);
  EXPECT_EQ(call.run(Backend::kCuda), call.run(Backend::kCpu));
}

TEST(NoiseOnGpu, SmallLearnedNoiseIsTheCpusToAFewUlp) {
  const NoiseCall call(RouterNoise::Kind::kLearned, 0.01F, 200, 33);
  const std::vector<float> have = call.run(Backend::kCuda);
  const std::vector<float> want = call.run(Backend::kCpu);
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(have[i], want[i], 2e-6 * (1 + std::abs(want[i]) + std::abs(call.noise_logits[i])))
        << i;
  }
}

TEST(NoiseOnGpu, SmallGradientsOfLearnedNoiseAreTheCpus) {
  const std::int64_t tokens = 60;
  const std::int64_t experts = 21;
  const std::vector<float> logits = random_floats(tokens * experts, 1, 3);
  const std::vector<float> dlogits = random_floats(tokens * experts, 2);
  for (const bool training : {true, false}) {
    std::vector<float> want(logits.size(), kNan);
    NoiseBackwardArgs args{
        .noise_logits = {logits.data(), {tokens, experts}},
        .dlogits = {dlogits.data(), {tokens, experts}},
        .noise = {.kind = RouterNoise::Kind::kLearned, .size = 0.01F},
        .request = {.seed = 3, .step = 4, .layer = 5, .first_token = 6, .training = training},
        .dnoise_logits = {want.data(), {tokens, experts}}};
    noise_backward(args);
    const DeviceArray<float> of_logits(logits), of_dlogits(dlogits), out(logits.size());
    args.noise_logits.data = of_logits.data();
    args.dlogits.data = of_dlogits.data();
    args.dnoise_logits.data = out.data();
    args.execution.backend = Backend::kCuda;
    noise_backward(args);
    const std::vector<float> have = out.get();
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(have[i], want[i], 1e-6 * (1 + std::abs(want[i]))) << i;
    }
  }
}

TEST(NoiseOnGpu, NoisyLogitsChooseTheSameExpertsOnBothDevices) {
  for (const Size& size : {Size{500, 64, 4}, Size{40, 7, 7}}) {
    Call call("v-moe:noise=1", size, 3);
    NoiseCall noise(RouterNoise::Kind::kLogits, 1.0F, size.num_tokens, size.num_experts);
    noise.values = call.logits;
    call.logits = noise.run(Backend::kCuda);
    EXPECT_EQ(call.logits, noise.run(Backend::kCpu));
    const Result want = on_cpu(call);
    const Result have = on_gpu(call);
    EXPECT_EQ(have.expert, want.expert);
  }
}

/// The way back of a routing, with or without losses.
struct Back {
  Call call;
  Result routing;
  std::vector<float> dweight{}, before{}, prices{};
  std::int64_t groups = 0;  ///< Of the losses' prices.
  bool accumulate = false;

  Back(const char* router, const Size& size, unsigned seed)
      : call(router, size, seed), routing(on_cpu(call)) {
    dweight = random_floats(call.places(), seed + 1);
    before = random_floats(std::ssize(call.logits), seed + 2);
    prices = random_floats(2 * call.config.num_logits(), seed + 3);
  }

  [[nodiscard]] std::vector<float> run(Backend backend) const {
    const std::int64_t tokens = call.num_tokens;
    const std::int64_t width = call.config.num_logits();
    std::vector<float> out = before;
    if (!accumulate) out.assign(out.size(), kNan);
    const std::array<std::int64_t, 2> choices{tokens, call.config.top_k()};
    RouteBackwardArgs args{.config = call.config,
                           .request = call.request,
                           .accumulate = accumulate,
                           .execution = {.backend = backend}};
    if (backend == Backend::kCpu) {
      args.logits = {call.logits.data(), {tokens, width}};
      args.expert = {routing.expert.data(), choices};
      args.dweight = {dweight.data(), choices};
      args.dlogits = {out.data(), {tokens, width}};
      if (groups > 0) args.losses = losses(prices.data());
      route_backward(args);
      return out;
    }
    const DeviceArray<float> logits(call.logits), of_weights(dweight), dlogits(out), price(prices);
    const DeviceArray<std::int32_t> expert(routing.expert);
    args.logits = {logits.data(), {tokens, width}};
    args.expert = {expert.data(), choices};
    args.dweight = {of_weights.data(), choices};
    args.dlogits = dlogits.matrix(tokens, width);
    if (groups > 0) args.losses = losses(price.data());
    route_backward(args);
    return dlogits.get();
  }
  void expect_cpu() const {
    const std::vector<float> want = run(Backend::kCpu);
    const std::vector<float> have = run(Backend::kCuda);
    ASSERT_EQ(have.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(have[i], want[i], 1e-5 * (1 + std::abs(want[i]))) << i;
    }
  }

 private:
  [[nodiscard]] LossPrices losses(const float* price) const {
    return {.score = {price, {groups, call.config.num_logits()}}, .z = 0.05F, .entropy = 0.1F};
  }
};

void expect_gradients(auto& sizes) {
  unsigned seed = 100;
  for (const char* router : kOfLogits) {
    for (const Size& size : sizes) {
      if (!goes_with(router, size)) continue;
      Back back(router, size, ++seed);
      for (const bool accumulate : {false, true}) {
        for (const std::int64_t groups : {0, 1, 2}) {
          if (groups > 0 && size.num_tokens % groups != 0) continue;
          SCOPED_TRACE(testing::Message()
                       << router << ", " << size.num_tokens << " tokens, " << size.top_k << " of "
                       << size.num_experts << (accumulate ? ", added, " : ", ") << groups);
          back.accumulate = accumulate;
          back.groups = groups;
          back.expect_cpu();
        }
      }
    }
  }
}

TEST(RoutersBackwardOnGpu, SmallGradientsAreThoseOfTheCpu) { expect_gradients(kSmall); }

TEST(RoutersBackwardOnGpu, LargeGradientsAreThoseOfTheCpu) { expect_gradients(kLarge); }

TEST(RoutersBackwardOnGpu, RulesWithoutLogitsAreRefusedByName) {
  const Call call("hash", {3, 8, 2}, 1);
  expect_error(ErrorCode::kInvalidArgument, "hash has no logits", [&] {
    route_backward({.config = call.config, .execution = {.backend = Backend::kCuda}});
  });
}

}  // namespace
}  // namespace switchyard
