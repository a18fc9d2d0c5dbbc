// Weights on the inputs of experts, and experts that return their input, on a GPU: random layers
// against the reference in double, and what the CPU's layer tells of the same call.
#include <gtest/gtest.h>

#include <vector>

#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/made_up_layer.hpp"
#include "verify/case.hpp"
#include "verify/check_backward.hpp"
#include "verify/check_layer.hpp"

namespace switchyard {
namespace {

using test::expect_error;

constexpr std::int64_t kTokens = 70;
constexpr std::int64_t kHidden = 72;  // a whole warp's piece and a part of one
constexpr std::int32_t kExperts = 5;
constexpr std::int32_t kIdentity = 3;

LayerConfig config_of(std::int32_t top_k, std::int32_t identity, bool on_input,
                      std::int32_t constant = 0) {
  LayerConfig config;
  config.router = {.num_experts = kExperts + constant + identity,
                   .kind = TopKRouter{.top_k = top_k}};
  config.router.zero_computation.constant = constant;
  config.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = 40};
  config.shared = {.num_experts = 1, .hidden = kHidden, .inner = 24};
  config.router.zero_computation.copy = identity;
  config.weight_on_input = on_input;
  return config;
}

MadeUp with_constants(const LayerConfig& config, DType dtype) {
  MadeUp made(config, dtype, false);
  const std::int32_t constant = config.router.zero_computation.constant;
  made.model.constant_experts = random_floats(3 * constant * kHidden, 31, 0.2F);
  return made;
}

/// One call with its tokens on the host, of `dtype`.
struct HostCall {
  HostCall(DType of, std::int64_t num_tokens)
      : dtype(of),
        rows(num_tokens),
        tokens(stored_as(of, random_floats(num_tokens * kHidden, 11))),
        out(tokens.size()) {}

  [[nodiscard]] ForwardArgs args() {
    return {.tokens = {tokens.data(), dtype, rows, kHidden},
            .out = {out.data(), dtype, rows, kHidden},
            .request = {.record = &record}};
  }
  DType dtype;
  std::int64_t rows;
  std::vector<std::byte> tokens, out;
  RoutingRecord record;
};

TEST(PlacesOnGpu, SmallNumberOfRandomLayersAgreesWithTheReference) {
  int on_input = 0;
  int identity = 0;
  int constant = 0;
  for (std::uint64_t index = 0; index < 900; ++index) {
    const verify::Case test = verify::make_case(31, index, {1}, {1}, Backend::kCuda);
    if (verify::is_perft(test.router)) continue;
    const ZeroComputationExperts& others = test.layer.router.zero_computation;
    if (others.total() == 0 && !test.layer.weight_on_input) continue;
    constant += others.constant > 0 ? 1 : 0;
    on_input += test.layer.weight_on_input ? 1 : 0;
    identity += test.identity_experts > 0 ? 1 : 0;
    EXPECT_EQ(verify::check_layer(verify::make_problem(test), {.backend = Backend::kCuda}), "")
        << index;
  }
  EXPECT_GT(on_input, 20);
  EXPECT_GT(identity, 60);
  EXPECT_GT(constant, 10);
}

TEST(PlacesOnGpu, SmallNumberOfRandomLayersGoesBackAsTheReferenceDoes) {
  int on_input = 0;
  int identity = 0;
  int constant = 0;
  for (std::uint64_t index = 0; index < 700; ++index) {
    const verify::Case test = verify::make_case(37, index, {1}, {1}, Backend::kCuda);
    if (verify::is_perft(test.router) || !verify::has_backward(test)) continue;
    const ZeroComputationExperts& others = test.layer.router.zero_computation;
    if (others.total() == 0 && !test.layer.weight_on_input) continue;
    constant += others.constant > 0 ? 1 : 0;
    on_input += test.layer.weight_on_input ? 1 : 0;
    identity += test.identity_experts > 0 ? 1 : 0;
    EXPECT_EQ(verify::check_backward(verify::make_problem(test), verify::run_backward,
                                     {.backend = Backend::kCuda}),
              "")
        << index;
  }
  EXPECT_GT(on_input, 15);
  EXPECT_GT(identity, 40);
  EXPECT_GT(constant, 6);
}

TEST(PlacesOnGpu, RecordCountsAndDropsAreTheCpus) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [on_input, tau] : {std::pair{false, 0.0F}, {true, 0.0F}, {false, 0.5F}}) {
      LayerConfig config = config_of(on_input ? 1 : 3, kIdentity, on_input, tau > 0 ? 2 : 0);
      config.router.zero_computation.tau = tau;
      const MadeUp made = with_constants(config, dtype);
      for (const std::optional<double> capacity : {std::optional<double>(), std::optional(0.5)}) {
        MoeLayer cpu(made.model, {.capacity_factor = capacity});
        MoeLayer gpu(made.model, {.backend = Backend::kCuda, .capacity_factor = capacity});
        for (const std::int64_t num_tokens : {kTokens, std::int64_t{1}, std::int64_t{0}}) {
          HostCall want(dtype, num_tokens);
          HostCall found(dtype, num_tokens);
          cpu.forward(want.args());
          gpu.forward(found.args());
          ASSERT_EQ(found.record.expert, want.record.expert);
          EXPECT_EQ(found.record.kept, want.record.kept);
          EXPECT_EQ(found.record.counts, want.record.counts);
          EXPECT_EQ(found.record.counts_kept, want.record.counts_kept);
          EXPECT_EQ(gpu.rows_used(), cpu.rows_used());
          EXPECT_EQ(gpu.stats().counts, cpu.stats().counts);
        }
      }
    }
  }
}

TEST(PlacesOnGpu, TokensOfIdentityExpertsAloneHaveTheCpusBits) {
  LayerConfig config = config_of(3, kIdentity, false);
  config.shared = {};
  const std::vector<float> weight = random_floats(kTokens * 3, 12);
  std::vector<std::int32_t> expert(weight.size());
  for (std::size_t i = 0; i < expert.size(); ++i) {
    expert[i] = i % 7 == 0 ? -1 : kExperts + static_cast<std::int32_t>(i * i) % kIdentity;
  }
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const MadeUp made(config, dtype, false);
    MoeLayer cpu(made.model, {});
    MoeLayer gpu(made.model, {.backend = Backend::kCuda});
    HostCall want(dtype, kTokens);
    HostCall found(dtype, kTokens);
    for (auto [layer, call] : {std::pair{&cpu, &want}, std::pair{&gpu, &found}}) {
      ForwardArgs args = call->args();
      args.expert = {expert.data(), {kTokens, 3}};
      args.weight = {weight.data(), {kTokens, 3}};
      layer->forward(args);
    }
    EXPECT_EQ(found.out, want.out);
  }
}

TEST(PlacesOnGpu, AGraphHoldsThemAndOtherTokensOfItsReplayCount) {
  for (const auto& [on_input, constant] : {std::pair{false, 0}, {true, 0}, {false, 2}}) {
    const MadeUp made =
        with_constants(config_of(on_input ? 1 : 3, kIdentity, on_input, constant), DType::kBF16);
    MoeLayer layer(made.model, {.backend = Backend::kCuda, .max_tokens = kTokens});
    cudaStream_t stream = nullptr;
    SWITCHYARD_CUDA(cudaStreamCreate(&stream));
    const auto values = [](unsigned seed) {
      return stored_as(DType::kBF16, random_floats(kTokens * kHidden, seed));
    };
    const DeviceArray<std::byte> tokens(values(21)), out(values(21).size());
    const auto matrix = [](const DeviceArray<std::byte>& array) {
      return RawMatrix{array.bytes(), DType::kBF16, kTokens, kHidden};
    };
    const ForwardArgs args{.tokens = matrix(tokens), .out = matrix(out), .stream = stream};
    {
      layer.forward(args);
      const CapturedGraph graph(stream, [&] { layer.forward(args); });
      for (const unsigned seed : {22U, 23U}) {
        tokens.set(values(seed));
        layer.forward(args);
        SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
        const std::vector<std::byte> want = out.get();
        out.fill(0xff);
        SWITCHYARD_CUDA(cudaDeviceSynchronize());
        graph.launch();
        SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
        EXPECT_EQ(out.get(), want);
      }
    }
    SWITCHYARD_CUDA(cudaStreamDestroy(stream));
  }
}

TEST(PlacesOnGpu, AnIdBehindThoseOfIdentityExpertsIsAnError) {
  const MadeUp made(config_of(1, kIdentity, false), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda});
  const std::vector<float> weight(kTokens, 1.0F);
  std::vector<std::int32_t> expert(kTokens, kExperts + kIdentity - 1);
  HostCall call(DType::kBF16, kTokens);
  ForwardArgs args = call.args();
  args.expert = {expert.data(), {kTokens, 1}};
  args.weight = {weight.data(), {kTokens, 1}};
  layer.forward(args);
  expert.back() = kExperts + kIdentity;
  expect_error(ErrorCode::kInvalidArgument, "1 expert ids are not in -1 to 7",
               [&] { layer.forward(args); });
}

}  // namespace
}  // namespace switchyard
