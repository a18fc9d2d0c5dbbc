// Layers whose experts multiply rows of e4m3: random ones against the reference, sizes of more than
// a block of scales, ranks, wires, graphs, and what is refused. Ranks are threads on the first GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/gpu/cuda_device.hpp"
#include "switchyard/comm.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/gpu/expect_output.hpp"
#include "testkit/quantised_source.hpp"
#include "tests/cuda/random_layers.hpp"
#include "verify/case.hpp"
#include "verify/verify.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using verify::Case;

/// The driver reads these when it is first called: no kernel is loaded while another spins, and
/// every rank's stream has a queue of its own.
[[maybe_unused]] const bool kPrepared = setenv("CUDA_MODULE_LOADING", "EAGER", 0) == 0 &&
                                        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

class Fp8Layer : public testing::Test {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) GTEST_SKIP() << "not Hopper";
  }
};

TEST_F(Fp8Layer, SmallNumberOfRandomLayersAgreesWithTheReference) {
  test::expect_random_layers(
      {.cases = 30, .seed = 3, .weights = WeightFormat::kE4M3, .fp8_rows = true});
}

TEST_F(Fp8Layer, RandomLayersAgreeWithTheReference) {
  test::expect_random_layers(
      {.cases = 200, .seed = 4, .weights = WeightFormat::kE4M3, .fp8_rows = true});
}

TEST_F(Fp8Layer, RandomLayersOverRanksAgreeWithTheReference) {
  test::expect_random_layers(
      {.cases = 30, .seed = 5, .weights = WeightFormat::kE4M3, .fp8_rows = true}, {2, 4});
}

/// More than one block of scales each way, and experts of very different counts.
Case large_case() {
  Case test;
  test.seed = 9;
  test.layer.router.num_experts = 6;
  test.base = {.top_k = 2};
  test.layer.router.kind = test.base;
  test.layer.experts = {.num_experts = 6, .hidden = 400, .inner = 272};
  test.weights = WeightFormat::kE4M3;
  test.fp8_rows = true;
  test.compute = test.dispatch_wire = DType::kBF16;
  test.tokens = test.output = DType::kBF16;
  test.num_tokens = 330;
  test.batch_invariant = true;
  return test;
}

void expect_holds(const Case& test) {
  std::ostringstream out;
  EXPECT_EQ(verify::run_verify({.backend = Backend::kCuda, .case_json = to_json(test).dump()}, out),
            0)
      << out.str();
}

TEST_F(Fp8Layer, ManyRowsOfSeveralBlocksAgreeWithTheReference) {
  Case test = large_case();
  expect_holds(test);
  test.dispatch_wire = DType::kF8E4M3;
  test.layer.experts.bias = true;
  test.layer.experts.activation = Activation::kClampedSwiglu;
  expect_holds(test);
  test.layout = {LayoutKind::kAligned, 16};
  test.capacity_factor = 0.8;
  expect_holds(test);
  test.ranks = 2;
  expect_holds(test);
}

/// A layer of random experts in e4m3.
struct Made {
  explicit Made(bool gated = true, std::int64_t inner = 192) {
    model.config.router = {.num_experts = 8, .kind = TopKRouter{.top_k = 2}};
    model.config.experts = {.num_experts = 8, .hidden = 256, .inner = inner, .gated = gated};
    model.experts =
        std::make_shared<QuantisedSource>(model.config.experts, WeightFormat::kE4M3, 17);
    Random random(5);
    std::vector<float> gate(8 * 256);
    for (float& value : gate) value = random.signed_unit() / 8;
    model.gate = std::move(gate);
  }
  LayerModel model;
};

std::vector<float> made_tokens(std::int64_t count, unsigned seed) {
  Random random(seed);
  std::vector<float> x(static_cast<std::size_t>(count * 256));
  for (float& value : x) value = random.signed_unit();
  return x;
}

LayerOptions fp8_options() {
  return {.backend = Backend::kCuda,
          .compute = DType::kF8E4M3,
          .max_tokens = 512,
          .weights = WeightFormat::kStored};
}

ForwardArgs args_of(const std::vector<float>& x, std::vector<float>& out) {
  const std::int64_t rows = std::ssize(x) / 256;
  out.assign(x.size(), std::numeric_limits<float>::quiet_NaN());
  return {.tokens = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, rows, 256},
          .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, rows, 256}};
}

std::vector<float> run(MoeLayer& layer, const std::vector<float>& x,
                       StageRecorder* recorder = nullptr, RoutingRecord* record = nullptr) {
  std::vector<float> out;
  ForwardArgs args = args_of(x, out);
  args.recorder = recorder;
  args.request.record = record;
  layer.forward(args);
  return out;
}

class Chosen final : public StageRecorder {
 public:
  void begin(std::string_view /*stage*/, void* /*stream*/) override {}
  void end(std::string_view stage, const StageWork& /*work*/, void* /*stream*/) override {
    ++ended[std::string(stage)];
  }
  void chose(std::string_view call, std::string_view implementation) override {
    chosen[std::string(call)] = implementation;
  }
  std::map<std::string, int> ended{};
  std::map<std::string, std::string> chosen{};
};

TEST_F(Fp8Layer, ManyRowsBecomeE4m3AndFewStayAsTheyAre) {
  const Made made;
  MoeLayer layer(made.model, fp8_options());
  EXPECT_EQ(layer.compute_dtype(), DType::kBF16);
  Chosen many;
  (void)run(layer, made_tokens(400, 1), &many);
  EXPECT_EQ(many.chosen["experts"], "cuda.grouped_fp8_sm90");
  EXPECT_EQ(many.ended["quantize"], 1);
  Chosen few;
  (void)run(layer, made_tokens(3, 1), &few);
  EXPECT_EQ(few.chosen["experts"], "cuda.streaming");
  EXPECT_EQ(few.ended["quantize"], 0);
}

TEST_F(Fp8Layer, EachElementIsWithinTheBoundOfTheFormatAndTheWholeIsNotThatOfBf16Rows) {
  const Made made;
  LayerOptions fp8 = fp8_options();
  fp8.weights = WeightFormat::kE4M3;
  fp8.batch_invariant = true;
  LayerOptions bf16 = fp8;
  bf16.compute = DType::kBF16;
  const std::vector<float> x = made_tokens(400, 6);
  const auto result_of = [&](const LayerOptions& options) {
    MoeLayer layer(made.model, options);
    RoutingRecord record;
    const std::vector<float> out = run(layer, x, nullptr, &record);
    return std::pair(out, record);
  };
  const auto [got, record] = result_of(fp8);
  const auto [want, record_of_bf16] = result_of(bf16);
  EXPECT_EQ(record.expert, record_of_bf16.expert);
  EXPECT_EQ(record.weight, record_of_bf16.weight);
  expect_within_bounds(made.model, fp8, DType::kBF16, x, {record}, got);
  expect_within_bounds(made.model, bf16, DType::kBF16, x, {record}, want);
  // The bounds of bf16 rows are for the worst case and would let it pass: as a whole it is off by
  // what e4m3 rounds.
  double off = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    off += std::pow(double{got[i]} - double{want[i]}, 2);
    norm += std::pow(double{want[i]}, 2);
  }
  EXPECT_GT(std::sqrt(off / norm), 0.005) << "nothing became e4m3";
}

TEST_F(Fp8Layer, AnFp8WireChangesNoBitsAndRanksNeitherWhereRowsAreMany) {
  const Made made;
  LayerOptions options = fp8_options();
  options.batch_invariant = true;
  const std::vector<float> x = made_tokens(400, 2);
  MoeLayer alone(made.model, options);
  const std::vector<float> want = run(alone, x);
  options.dispatch_wire = DType::kF8E4M3;
  MoeLayer sent(made.model, options);
  EXPECT_EQ(run(sent, x), want);
  for (const bool wire : {false, true}) {
    for (const std::int64_t most : {200, 700}) {  // low latency, throughput
      LayerOptions ranks = options;
      if (!wire) ranks.dispatch_wire.reset();
      ranks.max_tokens = most;
      std::vector<float> got(x.size());
      run_ranks(2, [&](Communicator& ranks_of) {
        const auto half = std::ssize(x) / 2;
        const auto first = ranks_of.rank() * half;
        const std::vector<float> mine(x.begin() + first, x.begin() + first + half);
        MoeLayer layer(made.model, ranks, &ranks_of);
        Chosen chosen;
        const std::vector<float> out = run(layer, mine, &chosen);
        std::copy(out.begin(), out.end(), got.begin() + first);
        EXPECT_EQ(chosen.chosen["experts"], "cuda.grouped_fp8_sm90");
        EXPECT_EQ(chosen.ended["quantize"], wire ? 0 : 1) << "what came is multiplied as it is";
        EXPECT_EQ(chosen.ended["dequantize"], 0);
      });
      EXPECT_EQ(got, want) << (wire ? "fp8" : "bf16") << " wire, most " << most;
    }
  }
}

TEST_F(Fp8Layer, AGraphIsReplayedWithNewRouting) {
  const Made made;
  MoeLayer layer(made.model, fp8_options());
  MoeLayer other(made.model, fp8_options());
  constexpr std::int64_t kTokens = 300;
  const DeviceArray<float> x(kTokens * 256), out(kTokens * 256);
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  const CapturedGraph graph(stream, [&] {
    layer.forward({.tokens = {x.bytes(), DType::kF32, kTokens, 256},
                   .out = {out.bytes(), DType::kF32, kTokens, 256},
                   .stream = stream});
  });
  for (unsigned seed = 0; seed < 100; ++seed) {
    const std::vector<float> values = made_tokens(kTokens, seed);
    x.set(values);
    graph.launch();
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    if (seed % 10 != 0) continue;
    EXPECT_EQ(out.get(), run(other, values)) << seed;
  }
  cudaStreamDestroy(stream);
}

TEST_F(Fp8Layer, RefusesWhatItDoesNotMultiply) {
  const Made made;
  LayerOptions exact = fp8_options();
  exact.weights = WeightFormat::kExact;
  expect_error(ErrorCode::kUnsupported, "compute=fp8 with weights=exact: want weights=stored",
               [&] { MoeLayer(made.model, exact); });
  expect_error(ErrorCode::kUnsupported, "compute=fp8 of plain experts",
               [&] { MoeLayer(Made(false).model, fp8_options()); });
  expect_error(ErrorCode::kUnsupported, "hidden=256 and inner=200 want multiples of 16",
               [&] { MoeLayer(Made(true, 200).model, fp8_options()); });
}

}  // namespace
}  // namespace switchyard
