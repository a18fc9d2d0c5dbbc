// Layers on a GPU in iterations (chain), with networks before the logits, and with logits of the
// layer before: random layers against the reference in double, the graph that a call becomes, and
// what a call counts.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/layer.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/made_up_layer.hpp"
#include "tests/cuda/random_layers.hpp"
#include "verify/verify.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kHidden = 64;
constexpr std::int32_t kExperts = 6;
constexpr const char* kChains[] = {"chain",
                                   "chain:iterations=3,inner-residual=no,outer-residual=yes"};
constexpr const char* kNetworks[] = {"top-k:network=cosine,width=16", "top-k:network=mlp,width=24",
                                     "top-k:network=hadamard,width=8",
                                     "relu:network=hadamard,width=40"};
constexpr const char* kResidual = "moe++:constant=3,tau=0,renormalize=no,residual=yes";

void expect_random(const std::string& router, std::int64_t cases) {
  SCOPED_TRACE(router);
  test::expect_random_layers(
      {.cases = cases, .seed = 11, .pass = verify::Pass::kBoth, .router = router});
}

TEST(IterationsOnGpu, SmallRandomLayersOfChainsNetworksAndResidualsAgreeWithTheReference) {
  for (const char* router : kChains) expect_random(router, 12);
  for (const char* router : kNetworks) expect_random(router, 12);
  expect_random(kResidual, 12);
}

TEST(IterationsOnGpu, RandomLayersOfChainsAgreeWithTheReferenceAndTheirIterationsByBits) {
  for (const char* router : kChains) expect_random(router, 200);
}

TEST(IterationsOnGpu, RandomLayersOfNetworksAndResidualsAgreeWithTheReference) {
  for (const char* router : kNetworks) expect_random(router, 150);
  expect_random(kResidual, 300);
}

/// A layer's parameters and a call's memory on the device.
class Step {
 public:
  Step(const std::string& router, DType dtype) : Step(MadeUp(config_of(router), dtype, true)) {}

  void set(unsigned seed) {
    tokens_.set(random_floats(kTokens * kHidden, seed));
    dout_.set(random_floats(kTokens * kHidden, seed + 1));
  }
  void both(MoeLayer& layer, SavedForward& saved, cudaStream_t stream) {
    layer.forward(
        {.tokens = matrix(tokens_), .out = matrix(out_), .stream = stream, .saved = &saved});
    BackwardArgs back{.saved = &saved,
                      .dout = matrix(dout_),
                      .dtokens = matrix(dtokens_),
                      .dgate = {dgate_.bytes(), DType::kF32, gate_rows(model), features_of(model)},
                      .drouter_bias = dbias_.vector(),
                      .stream = stream};
    const std::int64_t size = model.router_network.size();
    if (size > 0) back.drouter_network = {dnetwork_.data(), {size}};
    layer.backward(back);
  }
  [[nodiscard]] std::vector<std::byte> results() const {
    std::vector<std::byte> all;
    for (const DeviceArray<float>* array : arrays()) {
      const std::vector<float> values = array->get();
      const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
      all.insert(all.end(), bytes, bytes + values.size() * sizeof(float));
    }
    return all;
  }
  void forget() {
    for (const DeviceArray<float>* array : arrays()) array->fill(0xff);
  }

  static constexpr std::int64_t kTokens = 150;
  LayerModel model;

 private:
  explicit Step(MadeUp made)
      : model(model_of(made.model)),
        made_(std::move(made)),
        dgate_(static_cast<std::size_t>(gate_rows(model) * features_of(model))),
        dbias_(static_cast<std::size_t>(gate_rows(model))),
        dnetwork_(static_cast<std::size_t>(1 + model.router_network.size())) {
    set(1);
  }

  static LayerModel model_of(LayerModel model) {
    const RouterNetwork& network = model.config.router.network;
    const std::int64_t rows = gate_rows(model);
    model.gate = random_floats(rows * network.features(kHidden), 5, 0.2F);
    model.router_bias = random_floats(rows, 6, 0.1F);
    model.selection_bias = {};
    if (!network.is_linear()) {
      model.router_network = random_floats(network.size(kHidden), 7, 0.2F);
    }
    return model;
  }
  static LayerConfig config_of(const std::string& router) {
    LayerConfig config;
    config.router = parse_router(router, {.num_experts = kExperts, .kind = TopKRouter{.top_k = 2}});
    config.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = 48};
    return config;
  }
  static std::int64_t gate_rows(const LayerModel& model) {
    return model.config.router.num_gates() * std::int64_t{kExperts};
  }
  static std::int64_t features_of(const LayerModel& model) {
    return model.config.router.network.features(kHidden);
  }
  [[nodiscard]] std::array<const DeviceArray<float>*, 5> arrays() const {
    return {&out_, &dtokens_, &dgate_, &dbias_, &dnetwork_};
  }
  [[nodiscard]] static RawMatrix matrix(const DeviceArray<float>& array) {
    return {array.bytes(), DType::kF32, kTokens, kHidden};
  }

  MadeUp made_;  ///< Whose weights the model reads.
  DeviceArray<float> tokens_{kTokens * kHidden}, dout_{kTokens * kHidden}, out_{kTokens * kHidden},
      dtokens_{kTokens * kHidden}, dgate_, dbias_, dnetwork_;
};

TEST(IterationsOnGpu, SmallForwardAndBackwardInOneGraphReplayWithOtherInputs) {
  for (const char* router : {"chain:top-k=2,iterations=2", "top-k:network=cosine,width=16",
                             "top-k:network=hadamard,width=16", "switch:network=mlp,width=16"}) {
    SCOPED_TRACE(router);
    Step step(router, DType::kBF16);
    MoeLayer layer(step.model, {.backend = Backend::kCuda, .max_tokens = Step::kTokens});
    SavedForward saved;
    cudaStream_t stream = nullptr;
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    step.both(layer, saved, stream);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    const CapturedGraph graph(stream, [&] { step.both(layer, saved, stream); });
    for (unsigned seed = 20; seed < 23; ++seed) {
      step.set(seed);
      step.forget();
      graph.launch();
      SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
      const std::vector<std::byte> replayed = step.results();
      step.forget();
      step.both(layer, saved, stream);
      SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
      EXPECT_EQ(step.results(), replayed) << seed;
    }
    layer.check();
    SWITCHYARD_CUDA(cudaStreamDestroy(stream));
  }
}

TEST(IterationsOnGpu, SmallChainCountsTheRowsOfAllItsIterations) {
  Step step("chain:top-k=2,iterations=3", DType::kBF16);
  MoeLayer layer(step.model, {.backend = Backend::kCuda});
  SavedForward saved;
  step.both(layer, saved, nullptr);
  layer.check();
  EXPECT_EQ(layer.rows_used(), 3 * 2 * Step::kTokens);
}

TEST(IterationsOnGpu, SmallGateOf16BitsThatLiesOnTheGpuIsRefusedByANetwork) {
  Step step("top-k:network=mlp,width=16", DType::kBF16);
  const DeviceArray<std::byte> gate(static_cast<std::size_t>(2 * step.model.gate.size()));
  step.model.gate = Parameter(gate.bytes(), DType::kBF16, step.model.gate.size(), Backend::kCuda);
  test::expect_error(ErrorCode::kUnsupported,
                     "with jitter or a network the router's tokens are f32", [&] {
                       MoeLayer layer(step.model, {.backend = Backend::kCuda});
                       SavedForward saved;
                       step.both(layer, saved, nullptr);
                     });
}

}  // namespace
}  // namespace switchyard
