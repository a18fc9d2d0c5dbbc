// The way back through a layer on a GPU: random layers against the reference in double, and what it
// promises beside its numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/gpu/memory_count.hpp"
#include "switchyard/device.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/losses_checks.hpp"
#include "tests/cuda/backward/layer_step.hpp"
#include "tests/cuda/random_layers.hpp"
#include "verify/verify.hpp"

namespace switchyard {
namespace {

using namespace backward_on_gpu;

TEST(LayerBackwardOnGpu, SmallNumberOfRandomLayersAgreesWithTheReference) {
  test::expect_random_layers({.cases = 24, .seed = 5, .pass = verify::Pass::kBackward});
}

TEST(LayerBackwardOnGpu, RandomLayersAgreeWithTheReference) {
  test::expect_random_layers({.cases = 1500, .seed = 7, .pass = verify::Pass::kBackward});
}

TEST(LayerBackwardOnGpu, SmallStepsTwoForwardsInFlightGoBackInAnyOrder) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const MadeUp made(layer_config(), dtype, false);
    MoeLayer layer(made.model, on_gpu());
    for (const Recompute recompute : {Recompute::kNone, Recompute::kActivationInput}) {
      Step large(90, dtype, 1);
      Step small(7, dtype, 3);
      SavedForward first(recompute), second(recompute);
      const auto of_large = large.gradients_of(layer, first);
      const auto of_small = small.gradients_of(layer, second);
      for (int step = 0; step < 2; ++step) {
        large.forward(layer, &first);
        small.forward(layer, &second);
        large.forward(layer, nullptr);
        layer.backward(large.args(first));
        EXPECT_EQ(large.gradients(), of_large);
        layer.backward(small.args(second));
        EXPECT_EQ(small.gradients(), of_small);
        std::swap(first, second);  // the smaller call next in the larger one's memory
      }
    }
  }
}

TEST(LayerBackwardOnGpu, WhetherPreactivationsAreKeptDoesNotShowInTheBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const MadeUp made(layer_config(), dtype, false);
    MoeLayer layer(made.model, on_gpu());
    for (const std::int64_t tokens : {1, 5, 300}) {
      Step step(tokens, dtype, 4);
      SavedForward kept(Recompute::kNone), made_again(Recompute::kActivationInput);
      const auto want = step.gradients_of(layer, kept);
      EXPECT_EQ(step.gradients_of(layer, made_again), want) << to_string(dtype) << tokens;
      EXPECT_EQ(step.gradients_of(layer, kept), want) << to_string(dtype) << tokens;
    }
  }
}

TEST(LayerBackwardOnGpu, SeveralLayersForwardAndBackInOneGraphReplayWithOtherInputs) {
  const MadeUp made(layer_config(), DType::kBF16, false);
  const LayerOptions options{
      .backend = Backend::kCuda, .max_tokens = 200, .scratch = make_layer_scratch()};
  MoeLayer one(made.model, options), two(made.model, options);
  Step first(200, DType::kBF16, 1), second(150, DType::kBF16, 5);
  SavedForward of_first, of_second(Recompute::kActivationInput);
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  first.both(one, of_first, stream);
  second.both(two, of_second, stream);
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  const CapturedGraph graph(stream, [&] {
    first.forward(one, &of_first, stream);
    second.forward(two, &of_second, stream);
    two.backward(second.args(of_second, stream));
    one.backward(first.args(of_first, stream));
  });
  for (unsigned seed = 20; seed < 24; ++seed) {
    first.set(seed);
    second.set(seed + 100);
    graph.launch();
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    const auto of_one = first.gradients();
    const auto of_two = second.gradients();
    EXPECT_EQ(first.gradients_of(one, of_first), of_one) << seed;
    EXPECT_EQ(second.gradients_of(two, of_second), of_two) << seed;
  }
  one.check();
  two.check();
  SWITCHYARD_CUDA(cudaStreamDestroy(stream));
}

/// The gradient of a layer's losses at the logits that it has saved, from a CPU.
std::vector<float> gradient_of(const LossConfig& losses, const SavedForward& saved) {
  const auto num_tokens = saved.logits().shape[0];
  test::LossCase c(num_tokens, kExperts, kTopK, Score::kSoftmax, losses);
  c.logits = copy_out<float>(saved.logits().data, saved.logits().size(), nullptr);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const float* const row = c.logits_view().row(t);
    std::vector<std::int32_t> ids = {0, 1, 2, 3, 4, 5};
    std::stable_sort(ids.begin(), ids.end(), [&](auto a, auto b) { return row[a] > row[b]; });
    std::copy_n(ids.begin(), kTopK, c.expert.begin() + t * kTopK);
  }
  const test::LossResult result = test::losses_on_cpu(c);
  const auto values = copy_out<double>(saved.losses().data, kLossValues, nullptr);
  const auto near = [](double value) { return 1e-6 * (1 + std::abs(value)); };
  EXPECT_NEAR(values[0], result.values.balance, near(result.values.balance));
  EXPECT_NEAR(values[kLossValues - 1], result.values.total, near(result.values.total));
  return result.dlogits;
}

TEST(LayerBackwardOnGpu, SmallLossesOfItsConfigurationHaveTheGradientsOfACallerWhoAddsThem) {
  const MadeUp made(layer_config(), DType::kF32, false);
  LayerOptions options = on_gpu();
  options.losses = {.balance = 20, .z = 10, .entropy = 5};
  MoeLayer with(made.model, options);
  MoeLayer without(made.model, on_gpu());
  for (const std::int64_t num_tokens : {40, 7}) {  // the smaller call in the larger one's memory
    Step step(num_tokens, DType::kF32, 5);
    SavedForward saved;
    step.both(with, saved);
    const std::vector<std::byte> have = step.gradients();
    step.forward(without, &saved);
    EXPECT_EQ(saved.losses().data, nullptr);
    step.forward(with, &saved);
    const DeviceArray<float> dlogits(gradient_of(options.losses, saved));
    step.forward(without, &saved);
    BackwardArgs args = step.args(saved);
    args.dlogits = {dlogits.data(), {num_tokens, kExperts}};
    without.backward(args);
    const std::vector<std::byte> want = step.gradients();
    for (std::size_t i = 0; i < want.size(); i += sizeof(float)) {
      float a = 0;
      float b = 0;
      std::memcpy(&a, have.data() + i, sizeof a);
      std::memcpy(&b, want.data() + i, sizeof b);
      ASSERT_NEAR(a, b, 2e-4) << i;
    }
  }
}

TEST(LayerBackwardOnGpu, ASavedForwardWithoutMemoryIsRefusedWhileAStreamIsCaptured) {
  const MadeUp made(layer_config(), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda, .max_tokens = 64});
  Step step(64, DType::kBF16, 1);
  SavedForward used, fresh;
  step.both(layer, used);
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  expect_error(ErrorCode::kInvalidArgument, "make such a forward with it before", [&] {
    const CapturedGraph graph(stream, [&] { step.forward(layer, &fresh, stream); });
  });
  SWITCHYARD_CUDA(cudaStreamDestroy(stream));
}

TEST(LayerBackwardOnGpu, ItsRowsLieInMemoryOfTheForwardAndOfWhatIsSaved) {
  constexpr std::int64_t kTokens = 4096;
  constexpr std::int64_t kRows = kTokens * kTopK;
  LayerConfig config = layer_config();
  config.shared = {};
  config.shared_gated = false;
  const MadeUp made(config, DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda, .max_tokens = kTokens});
  Step step(kTokens, DType::kBF16, 1);
  step.forward(layer, nullptr);
  const std::int64_t before = DeviceMemoryCount::now();
  SavedForward saved;
  step.forward(layer, &saved);
  BackwardArgs args = step.args(saved);
  args.shared = {};
  args.dshared_gate = {};
  layer.backward(args);
  layer.check();
  // Beside what is saved: no rows of H or I values, of which the smallest has 786 KB.
  const std::int64_t workspace =
      experts_backward_workspace_bytes(config.experts, DType::kBF16, kExperts, kRows,
                                       {.dpreactivation = true, .weighted_activation = true}) +
      router_gemm_backward_workspace_bytes(kTokens, kExperts, kHidden);
  const std::int64_t by_choice = 4 * kTokens * (kTopK + kExperts) + 8 * kRows;
  EXPECT_LE(DeviceMemoryCount::now() - before,
            saved.bytes() + workspace + by_choice + (std::int64_t{1} << 17));
}

TEST(LayerBackwardOnGpu, ASavedForwardIsUsedOnceAndByItsOwnLayer) {
  const MadeUp made(layer_config(), DType::kBF16, false);
  MoeLayer layer(made.model, on_gpu()), twin(made.model, on_gpu());
  Step step(6, DType::kBF16, 1);
  SavedForward saved;
  const auto refused = [&](MoeLayer& by, const char* words) {
    expect_error(ErrorCode::kInvalidArgument, words, [&] { by.backward(step.args(saved)); });
  };
  refused(layer, "no forward has filled this saved forward");
  step.forward(layer, &saved);
  refused(twin, "another layer's");
  EXPECT_TRUE(saved.ready());
  layer.backward(step.args(saved));
  refused(layer, "a backward has used this saved forward already");
  step.forward(layer, &saved);
  layer.reload_experts();
  refused(layer, "the experts were reloaded after this saved forward");
  (void)step.gradients_of(layer, saved);
}

TEST(LayerBackwardOnGpu, GradientsInHostMemoryAreRefusedByNameAndNothingIsUsedUp) {
  const MadeUp made(layer_config(), DType::kBF16, false);
  MoeLayer layer(made.model, on_gpu());
  Step step(6, DType::kBF16, 1);
  SavedForward saved;
  step.forward(layer, &saved);
  std::vector<float> host(kExperts * kHidden);
  BackwardArgs args = step.args(saved);
  args.dgate.data = reinterpret_cast<std::byte*>(host.data());
  expect_error(ErrorCode::kInvalidArgument, "dgate lies in host memory",
               [&] { layer.backward(args); });
  EXPECT_TRUE(saved.ready());
  layer.backward(step.args(saved));
}

TEST(LayerBackwardOnGpu, WeightsOfTheCallerAreUsedWhereTheyLie) {
  const MadeUp made(layer_config(), DType::kBF16, false);
  const DeviceArray<std::byte> w13(made.w13), w2(made.w2), shared13(made.shared13),
      shared2(made.shared2);
  LayerModel model = made.model;
  const LayerConfig config = layer_config();
  model.experts = make_device_source(config.experts, DType::kBF16, w13.data(), w2.data());
  model.shared = make_device_source(config.shared, DType::kBF16, shared13.data(), shared2.data());
  MoeLayer in_place(model, on_gpu()), copied(made.model, on_gpu());
  Step step(40, DType::kBF16, 1);
  SavedForward saved;
  const auto want = step.gradients_of(copied, saved);
  EXPECT_EQ(step.gradients_of(in_place, saved), want);
  w13.fill(0);
  EXPECT_NE(step.gradients_of(in_place, saved), want);
  w13.set(made.w13);
  in_place.reload_experts();
  EXPECT_EQ(step.gradients_of(in_place, saved), want);
}

}  // namespace
}  // namespace switchyard
