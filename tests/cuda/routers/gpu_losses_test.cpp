// Auxiliary losses on a GPU, all three steps, against differences of the reference in double, and
// their sums against those of a CPU.
#include <gtest/gtest.h>

#include "switchyard/device.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/losses_checks.hpp"

namespace switchyard {
namespace {

using test::HostSums;
using test::LossCase;
using test::LossResult;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Memory of a case on the GPU; a workspace is zeroed once.
struct OnGpu {
  explicit OnGpu(const LossCase& of)
      : c(of),
        groups(of.groups()),
        num_experts(of.router.num_experts),
        logits(of.logits),
        expert(of.expert),
        counts(index(groups * num_experts)),
        firsts(counts.size()),
        devices(index(groups * of.losses.devices)),
        scores(counts.size()),
        token_sums(index(kTokenSums)),
        workspace(index(routing_sums_workspace_bytes(groups, num_experts, of.losses.devices))) {
    workspace.fill(0);
  }

  [[nodiscard]] Execution execution() const {
    return {.backend = Backend::kCuda,
            .workspace = workspace.data(),
            .workspace_bytes = static_cast<std::int64_t>(workspace.bytes())};
  }
  [[nodiscard]] RoutingSums sums() const {
    const std::array<std::int64_t, 2> shape = {groups, num_experts};
    return {.counts = {counts.data(), shape},
            .first_choices = {firsts.data(), shape},
            .device_tokens = {devices.data(), {groups, c.losses.devices}},
            .scores = {scores.data(), shape},
            .tokens = {token_sums.data(), {kTokenSums}}};
  }
  void add_up() const {
    routing_sums({.logits = {logits.data(), c.logits_view().shape},
                  .assignments = DenseAssignments{.expert = {expert.data(), c.expert_view().shape}},
                  .score = c.router.as_top_k().score,
                  .sums = sums(),
                  .execution = execution()});
  }
  [[nodiscard]] HostSums back() const {
    HostSums host(groups, num_experts, c.losses.devices);
    host.counts = counts.get();
    host.first_choices = firsts.get();
    host.device_tokens = devices.get();
    host.scores = scores.get();
    host.tokens = token_sums.get();
    return host;
  }

  const LossCase& c;
  std::int64_t groups, num_experts;
  DeviceArray<float> logits;
  DeviceArray<std::int32_t> expert;
  DeviceArray<std::int64_t> counts, firsts, devices;
  DeviceArray<double> scores, token_sums;
  DeviceBytes workspace;
};

/// @param dweight  [T, K] of the experts' weights. @param start  [T, E] what dlogits has; or none.
LossResult losses_on_gpu(const LossCase& c, const std::vector<float>& dweight,
                         const std::vector<float>& start = {}) {
  const OnGpu gpu(c);
  gpu.add_up();
  const DeviceArray<double> values(index(kLossValues));
  const DeviceArray<float> prices(index(gpu.groups * gpu.num_experts));
  const DeviceArray<std::int64_t> global(c.global_counts.empty() ? std::vector<std::int64_t>(1)
                                                                 : c.global_counts);
  const LossPrices priced = router_losses(
      {.sums = gpu.sums(),
       .num_tokens = c.num_tokens,
       .config = c.losses,
       .global_counts = c.global_counts.empty()
                            ? Vector<const std::int64_t>{}
                            : Vector<const std::int64_t>{global.data(), {gpu.num_experts}},
       .scale = c.scale,
       .values = {values.data(), {kLossValues}},
       .score_prices = {prices.data(), {gpu.groups, gpu.num_experts}},
       .execution = gpu.execution()});
  const DeviceArray<float> gradients(dweight);
  const DeviceArray<float> dlogits(c.logits.size());
  if (!start.empty()) dlogits.set(start);
  route_backward({.logits = {gpu.logits.data(), c.logits_view().shape},
                  .expert = {gpu.expert.data(), c.expert_view().shape},
                  .dweight = {gradients.data(), c.expert_view().shape},
                  .config = c.router,
                  .losses = priced,
                  .dlogits = {dlogits.data(), c.logits_view().shape},
                  .accumulate = !start.empty(),
                  .execution = gpu.execution()});
  LossResult result;
  const std::vector<double> host = values.get();
  std::copy_n(reinterpret_cast<const LossValues*>(host.data()), 1, &result.values);
  result.dlogits = dlogits.get();
  return result;
}

LossResult alone(const LossCase& c) {
  return losses_on_gpu(c, std::vector<float>(c.expert.size()));
}

/// In floats with approximate exponentials, where prices of about 0.1 cancel.
constexpr test::GradientBound kBound{.share = 1e-5, .cancelled = 0.1};

TEST(LossesOnGpu, SmallOnesOfEveryScopeShareAndScoreAgreeWithDifferencesOfTheReference) {
  test::expect_every_loss(9, 6, 2, alone, kBound);
  test::expect_every_loss(12, 4, 1, alone, kBound);
  test::expect_every_loss(6, 5, 5, alone, kBound);
}

TEST(LossesOnGpu, EveryWidthOfARowAgreesWithDifferencesOfTheReference) {
  const LossConfig all{.balance = 0.5,
                       .z = 0.125,
                       .importance = 0.5,
                       .device = 0.25,
                       .communication = 0.75,
                       .entropy = -0.5,
                       .devices = 4,
                       .devices_per_token = 2};
  for (const std::int32_t num_experts : {32, 60, 64, 128, 252, 256, 500, 1020, 1024}) {
    for (const Score score : {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid}) {
      SCOPED_TRACE(testing::Message() << num_experts << " " << static_cast<int>(score));
      const LossCase c(24, num_experts, 8, score, all);
      test::expect_reference(c, alone(c), kBound);
    }
  }
}

TEST(LossesOnGpu, ManyTokensHaveTheSumsOfACpuAndTheSameBitsTwice) {
  for (const LossScope scope : {LossScope::kBatch, LossScope::kSequence}) {
    for (const std::int32_t num_experts : {127, 128}) {
      const LossCase c(
          32768, num_experts, 8, Score::kSoftmax,
          {.scope = scope, .sequence_length = scope == LossScope::kSequence ? 512 : 0});
      const OnGpu gpu(c);
      gpu.add_up();
      const HostSums first = gpu.back();
      gpu.add_up();  // the first has left zeros
      EXPECT_TRUE(gpu.back() == first) << num_experts;
      HostSums host(gpu.groups, num_experts, 1);
      routing_sums({.logits = c.logits_view(),
                    .assignments = DenseAssignments{.expert = c.expert_view()},
                    .sums = host.view()});
      EXPECT_EQ(first.counts, host.counts);
      EXPECT_EQ(first.first_choices, host.first_choices);
      EXPECT_EQ(first.device_tokens, host.device_tokens);
      for (std::size_t i = 0; i < host.scores.size(); ++i) {
        ASSERT_NEAR(first.scores[i], host.scores[i], 2e-6 * host.scores[i]) << i;
      }
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_NEAR(first.tokens[i], host.tokens[i], 2e-6 * host.tokens[i]) << i;
      }
    }
  }
}

TEST(LossesOnGpu, ManyTokensThatShareWarpsHaveTheGradientsOfACpu) {
  const LossConfig all{.balance = 1,
                       .z = 0.5,
                       .device = 0.25,
                       .communication = 0.25,
                       .entropy = 0.25,
                       .devices = 2,
                       .devices_per_token = 2};
  for (const std::int32_t num_experts : {40, 64, 98, 128, 250}) {
    for (const Score score : {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid}) {
      SCOPED_TRACE(testing::Message() << num_experts << " " << static_cast<int>(score));
      LossCase c(4101, num_experts, 8, score, all);
      c.scale = static_cast<double>(c.num_tokens);  // a token's gradient is of the size of 1
      const LossResult want = test::losses_on_cpu(c);
      const LossResult have = alone(c);
      test::expect_near(have.values.total, want.values.total, "total");
      for (std::size_t i = 0; i < want.dlogits.size(); ++i) {
        ASSERT_NEAR(have.dlogits[i], want.dlogits[i], 1e-5) << i;
      }
    }
  }
}

TEST(LossesOnGpu, SmallOnesAreAddedToTheChoicesGradientAndToWhatIsThere) {
  for (const Score score : {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid}) {
    for (const bool renormalize : {false, true}) {
      LossCase c(50, 20, 3, score, {.balance = 1, .z = 1});
      c.router.as_top_k().renormalize = renormalize;
      c.router.as_top_k().scale = 2.5F;
      c.expert[4] = -1;
      const std::vector<float> dweight = random_floats(150, 3);
      const std::vector<float> start = random_floats(1000, 4);
      std::vector<float> want = start;
      route_backward({.logits = c.logits_view(),
                      .expert = c.expert_view(),
                      .dweight = {dweight.data(), {50, 3}},
                      .config = c.router,
                      .dlogits = {want.data(), {50, 20}},
                      .accumulate = true});
      const std::vector<float> of_losses = test::losses_on_cpu(c).dlogits;
      const std::vector<float> have = losses_on_gpu(c, dweight, start).dlogits;
      for (std::size_t i = 0; i < have.size(); ++i) {
        ASSERT_NEAR(have[i], want[i] + of_losses[i], 1e-5) << i;
      }
    }
  }
}

TEST(LossesOnGpu, SmallLogitsThatSaturateHaveFiniteGradients) {
  const LossConfig all{.balance = 1, .importance = 1, .entropy = 1};
  for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
    for (const float size : {200.0F, 1e10F}) {
      for (const float dlogit : alone(LossCase(20, 7, 2, score, all, size)).dlogits) {
        ASSERT_TRUE(std::isfinite(dlogit)) << static_cast<int>(score) << " " << size;
      }
    }
  }
}

}  // namespace
}  // namespace switchyard
