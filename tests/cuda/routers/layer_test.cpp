// Layers on a GPU by routers other than top-k: random layers against the reference in double, and
// what the reference does not have against a CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "switchyard/layer.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/call_memory.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/made_up_layer.hpp"
#include "tests/cuda/random_layers.hpp"
#include "verify/verify.hpp"

namespace switchyard {
namespace {

using test::expect_error;

constexpr std::int64_t kHidden = 64;
constexpr std::int32_t kExperts = 6;

LayerConfig layer_config(std::int32_t num_experts = kExperts) {
  LayerConfig config;
  config.router = {.num_experts = num_experts, .kind = TopKRouter{.top_k = 2}};
  config.experts = {.num_experts = num_experts, .hidden = kHidden, .inner = 48};
  return config;
}

/// f32, so that a CPU's numbers are near.
LayerModel model_of(const MadeUp& made, const std::string& router) {
  LayerModel model = made.model;
  use_router(model, parse_router(router, model.config.router));
  if (!model.noise_gate.empty()) {
    model.noise_gate = random_floats(model.noise_gate.size(), 77, 0.2F);
  }
  return model;
}

TEST(LayerRoutersOnGpu, SmallNumberOfRandomLayersAgreesWithTheReference) {
  test::expect_random_layers(
      {.cases = 40, .seed = 3, .pass = verify::Pass::kBoth, .router = "all"});
}

TEST(LayerRoutersOnGpu, RandomLayersOfEveryRouterAgreeWithTheReference) {
  test::expect_random_layers(
      {.cases = 300, .seed = 4, .pass = verify::Pass::kBoth, .router = "all"});
}

/// A training call forward and back in f32, on a device.
struct Step {
  std::vector<float> tokens, dout, out, dtokens, dgate, dnoise_gate;
  std::vector<std::int32_t> ids;

  Step(const LayerModel& model, std::int64_t num_tokens, Backend backend) {
    const std::int64_t size = num_tokens * kHidden;
    const auto gate = static_cast<std::size_t>(model.config.router.num_logits() * kHidden);
    tokens = random_floats(size, 1);
    dout = random_floats(size, 2);
    out.resize(tokens.size());
    dtokens.resize(tokens.size());
    if (model.config.router.has_logits()) dgate.resize(gate);
    if (!model.noise_gate.empty()) dnoise_gate.resize(gate);
    for (std::int64_t t = 0; t < num_tokens; ++t) ids.push_back(static_cast<std::int32_t>(t % 11));
    run(model, num_tokens, backend);
  }

 private:
  void run(const LayerModel& model, std::int64_t num_tokens, Backend backend) {
    MoeLayer layer(model, {.backend = backend, .compute = DType::kF32});
    SavedForward saved;
    CallMemory memory(backend);
    const auto matrix = [&](std::vector<float>& values, std::int64_t rows) {
      std::vector<std::byte>& bytes = kept_.emplace_back(values.size() * sizeof(float));
      std::memcpy(bytes.data(), values.data(), bytes.size());
      return RawMatrix{values.empty() ? nullptr : memory.place(bytes), DType::kF32, rows, kHidden};
    };
    kept_.reserve(8);
    const std::int64_t logits = model.config.router.num_logits();
    const RawMatrix x = matrix(tokens, num_tokens);
    const RawMatrix y = matrix(out, num_tokens);
    const RawMatrix dy = matrix(dout, num_tokens);
    const RawMatrix dx = matrix(dtokens, num_tokens);
    const RawMatrix dg = matrix(dgate, logits);
    const RawMatrix dn = matrix(dnoise_gate, logits);
    layer.forward({.tokens = x,
                   .out = y,
                   .request = {.token_ids = {ids.data(), {num_tokens}},
                               .seed = 5,
                               .step = 6,
                               .layer = 7,
                               .first_token = 8,
                               .training = true},
                   .stream = memory.stream(),
                   .saved = &saved});
    layer.backward({.saved = &saved,
                    .dout = dy,
                    .dtokens = dx,
                    .dgate = dgate.empty() ? RawMatrix{} : dg,
                    .dnoise_gate = dnoise_gate.empty() ? RawMatrix{} : dn,
                    .stream = memory.stream()});
    layer.check();
    memory.finish();
    std::size_t next = 0;
    for (std::vector<float>* values : {&tokens, &out, &dout, &dtokens, &dgate, &dnoise_gate}) {
      std::memcpy(values->data(), kept_[next++].data(), values->size() * sizeof(float));
    }
  }

  std::vector<std::vector<std::byte>> kept_;
};

void expect_near(const char* name, const std::vector<float>& have, const std::vector<float>& want,
                 double tolerance) {
  ASSERT_EQ(have.size(), want.size()) << name;
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(have[i], want[i], tolerance * (1 + std::abs(want[i]))) << name << " " << i;
  }
}

TEST(LayerRoutersOnGpu, SmallTrainingStepsHaveTheGradientsOfACpu) {
  const MadeUp made(layer_config(), DType::kF32, false);
  for (const char* router :
       {"switch:jitter=0.2", "gshard", "gshard:second=threshold,threshold=0.4",
        "gshard:second=all,sampled=yes", "v-moe:noise=0.5", "noisy-top-k", "adamoe:null-experts=2",
        "expert-choice", "expert-threshold", "top-p", "relu", "hash", "uniform", "round-robin",
        "zipf", "hot", "dirichlet"}) {
    SCOPED_TRACE(router);
    const LayerModel model = model_of(made, router);
    for (const std::int64_t num_tokens : {1, 45}) {
      const Step want(model, num_tokens, Backend::kCpu);
      const Step have(model, num_tokens, Backend::kCuda);
      expect_near("out", have.out, want.out, 2e-5);
      expect_near("dtokens", have.dtokens, want.dtokens, 1e-4);
      expect_near("dgate", have.dgate, want.dgate, 2e-4);
      expect_near("dnoise_gate", have.dnoise_gate, want.dnoise_gate, 2e-4);
    }
  }
}

TEST(LayerRoutersOnGpu, ManyColumnsOfRulesThatTakeAnyNumberAreRefusedByName) {
  const MadeUp made(layer_config(33), DType::kF32, false);
  for (const char* router : {"expert-choice", "expert-threshold", "top-p", "relu"}) {
    const LayerModel model = model_of(made, router);
    expect_error(ErrorCode::kUnsupported, std::string(router) + " with num_experts=33 on CUDA",
                 [&] { const MoeLayer layer(model, {.backend = Backend::kCuda}); });
  }
  const MadeUp fits(layer_config(32), DType::kF32, false);
  for (const char* router : {"expert-choice", "expert-threshold", "top-p", "relu"}) {
    const LayerModel model = model_of(fits, router);
    const Step want(model, 300, Backend::kCpu);
    const Step have(model, 300, Backend::kCuda);
    // Logits differ in their last bits, and a choice where two of them nearly meet.
    int apart = 0;
    for (std::size_t token = 0; token < 300; ++token) {
      bool same = true;
      for (std::size_t i = token * kHidden; i < (token + 1) * kHidden; ++i) {
        same = same && std::abs(have.out[i] - want.out[i]) < 1e-4 * (1 + std::abs(want.out[i]));
      }
      apart += same ? 0 : 1;
    }
    EXPECT_LE(apart, 2) << router;
  }
}

TEST(LayerRoutersOnGpu, SmallHashLayersTakeIdsOfEitherMemoryAndNameThoseOutOfRange) {
  const MadeUp made(layer_config(), DType::kF32, false);
  LayerModel model = model_of(made, "hash");
  std::get<HashRouter>(model.config.router.kind).table =
      std::make_shared<std::vector<std::int32_t>>(
          balanced_hash_table({9, 7, 5, 5, 3, 2, 2}, kExperts, 2));
  MoeLayer layer(model, {.backend = Backend::kCuda});
  const DeviceArray<float> tokens(random_floats(20 * kHidden, 1)), out(20 * kHidden);
  std::vector<std::int32_t> ids;
  for (std::int32_t t = 0; t < 20; ++t) ids.push_back(t * t % 7);
  const DeviceArray<std::int32_t> on_device(ids);
  const auto forward = [&](const std::int32_t* of_tokens, RoutingRecord* record) {
    layer.forward({.tokens = {tokens.bytes(), DType::kF32, 20, kHidden},
                   .out = {out.bytes(), DType::kF32, 20, kHidden},
                   .request = {.record = record, .token_ids = {of_tokens, {20}}}});
    layer.check();
    return out.get();
  };
  RoutingRecord record;
  const std::vector<float> want = forward(ids.data(), &record);
  EXPECT_EQ(forward(on_device.data(), nullptr), want);
  EXPECT_EQ(record.expert.size(), 40U);
  EXPECT_EQ(layer.stats().counts.size(), static_cast<std::size_t>(kExperts));
  ids[13] = 7;
  expect_error(ErrorCode::kInvalidArgument, "token_ids[13] is 7, want 0 to 6",
               [&] { (void)forward(ids.data(), nullptr); });
  ids[13] = 2;
  (void)forward(ids.data(), nullptr);
  expect_error(ErrorCode::kInvalidArgument, "token_ids is not given",
               [&] { (void)forward(nullptr, nullptr); });
}

TEST(LayerRoutersOnGpu, StepsWithNoiseInAGraphHaveTheBitsOfThoseWithout) {
  const MadeUp made(layer_config(), DType::kBF16, false);
  for (const char* router : {"noisy-top-k", "switch:jitter=0.1", "expert-choice", "zipf"}) {
    SCOPED_TRACE(router);
    const LayerModel model = model_of(made, router);
    MoeLayer layer(model, {.backend = Backend::kCuda, .max_tokens = 96});
    const std::vector<std::byte> values = stored_as(DType::kBF16, random_floats(96 * kHidden, 1));
    const DeviceArray<std::byte> x(values), y(values.size()), dx(values.size());
    const auto matrix = [](const DeviceArray<std::byte>& array) {
      return RawMatrix{array.bytes(), DType::kBF16, 96, kHidden};
    };
    SavedForward saved;
    cudaStream_t stream = nullptr;
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const auto step = [&] {
      layer.forward({.tokens = matrix(x),
                     .out = matrix(y),
                     .request = {.seed = 1, .step = 2, .training = true},
                     .stream = stream,
                     .saved = &saved});
      layer.backward({.saved = &saved, .dout = matrix(x), .dtokens = matrix(dx), .stream = stream});
    };
    step();
    const std::vector<std::byte> want_y = y.get();
    const std::vector<std::byte> want_dx = dx.get();
    const CapturedGraph graph(stream, step);
    y.fill(0xff), dx.fill(0xff);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    graph.launch();
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    EXPECT_EQ(y.get(), want_y);
    EXPECT_EQ(dx.get(), want_dx);
    layer.check();
    SWITCHYARD_CUDA(cudaStreamDestroy(stream));
  }
}

}  // namespace
}  // namespace switchyard
