// Statistics that a layer on a GPU tells of its last forward: the CPU's, computed when asked.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <vector>

#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/made_up_layer.hpp"

namespace switchyard {
namespace {

using test::expect_error;

constexpr std::int64_t kTokens = 37;
constexpr std::int64_t kHidden = 64;
constexpr std::int32_t kExperts = 12;

LayerConfig small_config() {
  return {.router = {.num_experts = kExperts, .kind = TopKRouter{.top_k = 3}},
          .experts = {.num_experts = kExperts, .hidden = kHidden, .inner = 40}};
}

struct Call {
  std::vector<float> tokens = random_floats(kTokens * kHidden, 11);
  std::vector<float> out = std::vector<float>(tokens.size());

  [[nodiscard]] ForwardArgs args(std::int64_t num_tokens = kTokens) {
    const auto matrix = [&](std::vector<float>& values) {
      return RawMatrix{reinterpret_cast<std::byte*>(values.data()), DType::kF32, num_tokens,
                       kHidden};
    };
    return {.tokens = matrix(tokens), .out = matrix(out)};
  }
};

TEST(LayerStatsCuda, AreTheCpusForFewAndManyTokensWithAndWithoutCapacity) {
  const MadeUp made(small_config(), DType::kBF16, true);
  for (const std::optional<double> capacity : {std::optional<double>(), std::optional(0.75)}) {
    MoeLayer cpu(made.model, {.capacity_factor = capacity});
    MoeLayer cuda(made.model, {.backend = Backend::kCuda, .capacity_factor = capacity});
    for (const std::int64_t num_tokens : {kTokens, std::int64_t{1}}) {
      Call call;
      cpu.forward(call.args(num_tokens));
      cuda.forward(call.args(num_tokens));
      const metrics::Routing want = cpu.stats();
      const metrics::Routing found = cuda.stats();
      EXPECT_EQ(found.counts, want.counts);
      EXPECT_EQ(found.load.cv, want.load.cv);
      ASSERT_TRUE(found.entropies.has_value());
      EXPECT_NEAR(found.entropies->router, want.entropies->router, 1e-4);
      EXPECT_NEAR(found.entropies->marginal, want.entropies->marginal, 1e-4);
      EXPECT_NEAR(found.entropies->weights.value(), want.entropies->weights.value(), 1e-4);
      ASSERT_EQ(found.drops.has_value(), capacity.has_value());
      if (!found.drops) continue;
      EXPECT_EQ(found.drops->assignments, want.drops->assignments);
      EXPECT_EQ(found.drops->by_choice, want.drops->by_choice);
    }
  }
}

TEST(LayerStatsCuda, AreAnErrorWhereTheRoutingWasGivenOrSaved) {
  const MadeUp made(small_config(), DType::kBF16, false);
  MoeLayer layer(made.model, {.backend = Backend::kCuda});
  const auto expect_none = [&] {
    expect_error(ErrorCode::kInvalidArgument, "no routing to tell of",
                 [&] { (void)layer.stats(); });
  };
  expect_none();
  Call call;
  layer.forward(call.args());
  (void)layer.stats();
  const std::vector<std::int32_t> expert(kTokens * 3, 1);
  const std::vector<float> weight(expert.size(), 0.5F);
  ForwardArgs args = call.args();
  args.expert = {expert.data(), {kTokens, 3}};
  args.weight = {weight.data(), {kTokens, 3}};
  layer.forward(args);
  expect_none();
  SavedForward saved;
  args = call.args();
  args.saved = &saved;
  layer.forward(args);
  expect_none();
  layer.forward(call.args());
  EXPECT_EQ(layer.stats().load.cv_floor, std::sqrt((kExperts - 1) / (3.0 * kTokens)));
}

}  // namespace
}  // namespace switchyard
