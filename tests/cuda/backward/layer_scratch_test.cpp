// Memory that layers on a GPU share, and tokens that stay where they are for the way back.
#include <gtest/gtest.h>

#include "core/gpu/device_scope.hpp"
#include "core/gpu/memory_count.hpp"
#include "tests/cuda/backward/layer_step.hpp"

namespace switchyard {
namespace {

using namespace backward_on_gpu;

/// Some calls of two layers that take turns, of which later ones are larger: all gradients.
std::vector<std::vector<std::byte>> in_turns(const LayerModel& model, const LayerModel& wide,
                                             const LayerOptions& options, DType dtype) {
  MoeLayer one(model, options), two(model, options), other(wide, options);
  std::vector<std::vector<std::byte>> all;
  for (const std::int64_t tokens : {3, 40, 500}) {
    Step first(tokens, dtype, 1), second(2 * tokens, dtype, 5);
    SavedForward of_first, of_second(Recompute::kActivationInput);
    first.forward(one, &of_first);
    second.forward(two, &of_second);
    DeviceArray<std::byte> out(static_cast<std::size_t>(tokens * kHidden * size_of(dtype)));
    other.forward({.tokens = first.tokens(), .out = {out.bytes(), dtype, tokens, kHidden}});
    two.backward(second.args(of_second));
    one.backward(first.args(of_first));
    all.push_back(first.gradients());
    all.push_back(second.gradients());
    all.push_back(out.get());
  }
  return all;
}

TEST(LayerScratch, SmallLayersThatShareAScratchHaveTheBitsThatTheyHaveAlone) {
  LayerConfig wide = layer_config();
  wide.experts.inner = wide.shared.inner = 5 * kInner;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const MadeUp made(layer_config(), dtype, false), other(wide, dtype, false);
    LayerOptions options = on_gpu();
    const auto alone = in_turns(made.model, other.model, options, dtype);
    options.scratch = make_layer_scratch();
    EXPECT_EQ(in_turns(made.model, other.model, options, dtype), alone) << to_string(dtype);
  }
}

TEST(LayerScratch, LayersThatShareAScratchHaveItOnce) {
  constexpr std::int64_t kTokens = 4096;
  constexpr std::int64_t kRows = kTokens * kTopK;
  const MadeUp made(layer_config(), DType::kBF16, false);
  LayerOptions options{.backend = Backend::kCuda, .max_tokens = kTokens};
  const auto taken_by = [&](int layers) {
    const std::int64_t before = DeviceMemoryCount::now();
    std::vector<MoeLayer> all;
    for (int i = 0; i < layers; ++i) all.emplace_back(made.model, options);
    return DeviceMemoryCount::now() - before;
  };
  const std::int64_t apart = taken_by(3) - taken_by(1);
  options.scratch = make_layer_scratch();
  (void)taken_by(1);  // the scratch stays behind
  const std::int64_t shared = taken_by(3) - taken_by(1);
  // Rows between the products and behind them, tokens in the compute type; of shared experts too.
  const std::int64_t rows = 2 * kRows * (kInner + kHidden);
  const std::int64_t of_shared = 2 * kTokens * (kShared + kHidden);
  EXPECT_GE(apart - shared, 2 * (rows + of_shared + 2 * kTokens * kHidden));
}

TEST(LayerScratch, TokensThatStayAreNotCopiedAndGiveTheSameBits) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const MadeUp made(layer_config(), dtype, false);
    MoeLayer layer(made.model, on_gpu());
    Step step(70, dtype, 4);
    SavedForward copied, stays;
    const auto want = step.gradients_of(layer, copied);
    step.forward(layer, &stays, nullptr, true);
    layer.backward(step.args(stays));
    EXPECT_EQ(step.gradients(), want);
    EXPECT_EQ(copied.bytes() - stays.bytes(), 70 * kHidden * size_of(dtype));
  }
  // Of another type they are made anew, whatever is said of them.
  const MadeUp made(layer_config(), DType::kBF16, false);
  MoeLayer layer(made.model, on_gpu());
  Step step(70, DType::kF32, 4);
  SavedForward saved;
  const auto want = step.gradients_of(layer, saved);
  step.forward(layer, &saved, nullptr, true);
  step.forget_tokens();
  layer.backward(step.args(saved));
  EXPECT_EQ(step.gradients(), want);
}

TEST(LayerScratch, AScratchOfAnotherGpuIsRefusedByItsNumber) {
  int devices = 0;
  SWITCHYARD_CUDA(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "one GPU";
  const MadeUp made(layer_config(), DType::kBF16, false);
  LayerOptions options = on_gpu();
  {
    const DeviceScope there(1);
    options.scratch = make_layer_scratch();
  }
  expect_error(ErrorCode::kInvalidArgument, "scratch is of GPU 1, and the layer is made on GPU 0",
               [&] { const MoeLayer layer(made.model, options); });
}

}  // namespace
}  // namespace switchyard
