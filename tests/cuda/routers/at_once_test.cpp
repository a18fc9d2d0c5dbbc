// Noise, a routing and its sums from one call on a GPU, where they are one pass over the logits and
// where they are not, against those of a CPU.
#include <gtest/gtest.h>

#include <cmath>

#include "switchyard/routing/losses.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/loss_case.hpp"
#include "tests/cuda/routers/case.hpp"

namespace switchyard {
namespace {

using namespace test;

struct RoutedSums {
  Result routing;
  HostSums sums;
};

/// What two calls in turn leave; the first must leave the workspace as it was.
class SumsCall {
 public:
  SumsCall(const Call& call, std::int64_t groups, std::int64_t devices)
      : call_(call),
        shape_{groups, call.config.num_experts},
        devices_(devices),
        logits_(call.logits),
        bias_(call.selection_bias),
        weight_(at(call.places())),
        expert_(at(call.places())),
        counts_(at(groups * call.config.num_experts)),
        firsts_(counts_.size()),
        device_tokens_(at(groups * devices)),
        scores_(counts_.size()),
        token_sums_(at(kTokenSums)),
        workspace_(at(routing_sums_workspace_bytes(groups, call.config.num_experts, devices))) {
    workspace_.fill(0);
  }

  [[nodiscard]] RoutedSums run() const {
    const DeviceArray<DeviceStatus> status(std::vector<DeviceStatus>(1));
    RouteAtOnceArgs args{.route = call_.args()};
    args.route.logits.data = logits_.data();
    if (!call_.selection_bias.empty()) args.route.selection_bias.data = bias_.data();
    args.route.routing = {.expert = expert_.matrix(call_.num_tokens, call_.config.top_k()),
                          .weight = weight_.matrix(call_.num_tokens, call_.config.top_k())};
    args.route.execution = {.backend = Backend::kCuda,
                            .workspace = workspace_.data(),
                            .workspace_bytes = static_cast<std::int64_t>(workspace_.bytes()),
                            .status = status.data()};
    args.sums = {.counts = {counts_.data(), shape_},
                 .first_choices = {firsts_.data(), shape_},
                 .device_tokens = {device_tokens_.data(), {shape_[0], devices_}},
                 .scores = {scores_.data(), shape_},
                 .tokens = {token_sums_.data(), {kTokenSums}}};
    route_at_once(args);
    RoutedSums result{{.expert = expert_.get(), .weight = weight_.get(), .status = status.get()[0]},
                      HostSums(shape_[0], shape_[1], devices_)};
    result.sums.counts = counts_.get();
    result.sums.first_choices = firsts_.get();
    result.sums.device_tokens = device_tokens_.get();
    result.sums.scores = scores_.get();
    result.sums.tokens = token_sums_.get();
    return result;
  }

 private:
  const Call& call_;
  std::array<std::int64_t, 2> shape_;
  std::int64_t devices_;
  DeviceArray<float> logits_, bias_, weight_;
  DeviceArray<std::int32_t> expert_;
  DeviceArray<std::int64_t> counts_, firsts_, device_tokens_;
  DeviceArray<double> scores_, token_sums_;
  DeviceBytes workspace_;
};

RoutedSums sums_on_cpu(const Call& call, std::int64_t groups, std::int64_t devices) {
  RoutedSums result{{.expert = std::vector<std::int32_t>(at(call.places())),
                     .weight = std::vector<float>(at(call.places()))},
                    HostSums(groups, call.config.num_experts, devices)};
  RouteAtOnceArgs args{.route = call.args(), .sums = result.sums.view()};
  const std::array<std::int64_t, 2> places{call.num_tokens, call.config.top_k()};
  args.route.routing = {.expert = {result.routing.expert.data(), places},
                        .weight = {result.routing.weight.data(), places}};
  route_at_once(args);
  return result;
}

void expect_close(double have, double want, const char* what) {
  EXPECT_NEAR(have, want, 2e-6 * std::abs(want) + 1e-9) << what;
}

void expect_cpu(const Call& call, std::int64_t groups, std::int64_t devices) {
  const SumsCall on_gpu(call, groups, devices);
  const RoutedSums have = on_gpu.run();
  const RoutedSums want = sums_on_cpu(call, groups, devices);
  EXPECT_TRUE(have.routing.status.ok());
  ASSERT_EQ(have.routing.expert, want.routing.expert);
  for (std::size_t i = 0; i < want.routing.weight.size(); ++i) {
    ASSERT_NEAR(have.routing.weight[i], want.routing.weight[i], 4e-6 * want.routing.weight[i]) << i;
  }
  EXPECT_EQ(have.sums.counts, want.sums.counts);
  EXPECT_EQ(have.sums.first_choices, want.sums.first_choices);
  EXPECT_EQ(have.sums.device_tokens, want.sums.device_tokens);
  for (std::size_t i = 0; i < want.sums.scores.size(); ++i) {
    expect_close(have.sums.scores[i], want.sums.scores[i], "score");
  }
  expect_close(have.sums.tokens[0], want.sums.tokens[0], "squares");
  expect_close(have.sums.tokens[1], want.sums.tokens[1], "entropies");
  const RoutedSums again = on_gpu.run();
  EXPECT_TRUE(again.sums == have.sums);
  EXPECT_EQ(again.routing.weight, have.routing.weight);
}

constexpr const char* kRouters[] = {"top-k",
                                    "top-k:score=topk-softmax",
                                    "top-k:score=sigmoid",
                                    "top-k:renormalize=no",
                                    "switch",
                                    "gshard",
                                    "gshard:second=all",
                                    "gshard:second=threshold,threshold=0.4"};

TEST(RouteAtOnceOnGpu, SmallRoutingsAndSumsAreTheCpus) {
  for (const char* router : kRouters) {
    for (const Size& size :
         {Size{0, 8, 2}, {1, 2, 2}, {3, 8, 2}, {7, 5, 5}, {33, 40, 6}, {70, 130, 8}}) {
      SCOPED_TRACE(testing::Message() << router << " " << size.num_tokens << " x "
                                      << size.num_experts << " K " << size.top_k);
      expect_cpu(Call(router, size, 3), 1, 1);
    }
  }
}

TEST(RouteAtOnceOnGpu, LargeRoutingsOfGroupsAndDevicesAreTheCpus) {
  for (const char* router : kRouters) {
    for (const Size& size : {Size{4100, 64, 8}, {6000, 128, 2}, {2400, 256, 8}, {1000, 252, 1}}) {
      SCOPED_TRACE(testing::Message() << router << " " << size.num_tokens << " x "
                                      << size.num_experts << " K " << size.top_k);
      expect_cpu(Call(router, size, 4), 1, 4);
      expect_cpu(Call(router, size, 4), size.num_tokens / 20, 2);
    }
  }
}

/// Noise of the router on the GPU, its choice and, `with_sums`, the sums of it.
void expect_noise_of_cpu(const std::string& router, Score score, const Size& size, bool with_sums) {
  Call call(router, size, 6);
  call.config.as_top_k().score = score;
  const std::array<std::int64_t, 2> shape{size.num_tokens, size.num_experts};
  const std::vector<float> of_noise = random_floats(std::ssize(call.logits), 8);
  const DeviceArray<float> logits(call.logits), noise_logits(of_noise), weight(at(call.places()));
  const DeviceArray<std::int32_t> expert(at(call.places()));
  const DeviceArray<std::int64_t> counts(at(size.num_experts)), firsts(counts.size()), devices(1);
  const DeviceArray<double> scores(counts.size()), tokens(at(kTokenSums));
  const DeviceBytes workspace(at(routing_sums_workspace_bytes(1, size.num_experts, 1)));
  workspace.fill(0);
  RouteAtOnceArgs args{.route = call.args(),
                       .noisy_logits = {logits.data(), shape},
                       .noise_logits = {noise_logits.data(), shape}};
  args.route.logits.data = logits.data();
  args.route.routing = {.expert = expert.matrix(size.num_tokens, call.config.top_k()),
                        .weight = weight.matrix(size.num_tokens, call.config.top_k())};
  args.route.execution = {.backend = Backend::kCuda,
                          .workspace = workspace.data(),
                          .workspace_bytes = static_cast<std::int64_t>(workspace.bytes())};
  if (with_sums) {
    args.sums = {.counts = {counts.data(), {1, size.num_experts}},
                 .first_choices = {firsts.data(), {1, size.num_experts}},
                 .device_tokens = {devices.data(), {1, 1}},
                 .scores = {scores.data(), {1, size.num_experts}},
                 .tokens = {tokens.data(), {kTokenSums}}};
  }
  route_at_once(args);

  std::vector<float> want = call.logits;
  add_noise({.logits = {want.data(), shape},
             .noise_logits = {of_noise.data(), shape},
             .noise = call.config.noise,
             .request = call.request});
  const std::vector<float> have = logits.get();
  const bool same_bits = call.config.noise.kind == RouterNoise::Kind::kLogits;
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(have[i], want[i], same_bits ? 0 : 2e-6 * (2 + std::abs(want[i]))) << i;
  }
  call.logits = have;  // noise of a few ulp less or more might choose others
  EXPECT_EQ(expert.get(), on_cpu(call).expert);
  if (!with_sums) return;
  const RoutedSums sums = sums_on_cpu(call, 1, 1);
  EXPECT_EQ(counts.get(), sums.sums.counts);
  for (std::size_t e = 0; e < counts.size(); ++e) {
    expect_close(scores.get()[e], sums.sums.scores[e], "score");
  }
}

TEST(RouteAtOnceOnGpu, SmallNoiseIsTheCpusAndChosenUpon) {
  for (const char* router : {"v-moe:noise=0.5", "noisy-top-k"}) {
    for (const Size& size :
         {Size{1, 2, 1}, Size{35, 9, 3}, Size{700, 128, 2}, Size{300, 252, 8}, Size{150, 300, 9}}) {
      SCOPED_TRACE(testing::Message() << router << " " << size.num_tokens << " x "
                                      << size.num_experts << " K " << size.top_k);
      for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
        expect_noise_of_cpu(router, score, size, false);
        expect_noise_of_cpu(router, score, size, true);
      }
    }
  }
}

TEST(RouteAtOnceOnGpu, WhatIsNotOnePassIsDoneInTurn) {
  expect_cpu(Call("gshard:sampled=yes", {300, 24, 2}, 5), 1, 2);
  expect_cpu(Call("top-k", {300, 320, 9}, 5), 1, 2);
  Call biased("top-k:score=sigmoid", {300, 24, 3}, 5);
  biased.selection_bias = random_floats(24, 9, 0.05F);
  expect_cpu(biased, 1, 2);
}

TEST(RouteAtOnceOnGpu, SmallTiesGoToTheLowerExpertAndInfinitiesAreScores) {
  for (const char* router : kRouters) {
    SCOPED_TRACE(router);
    Call call(router, {40, 24, 2}, 5);
    for (float& logit : call.logits) logit = std::round(logit);
    expect_cpu(call, 1, 1);
    for (std::size_t i = 0; i < 24; ++i) call.logits[i] = -kInf;  // a whole token
    for (std::size_t i = 30; i < 40; ++i) call.logits[i] = -kInf;
    const RoutedSums have = SumsCall(call, 1, 1).run();
    EXPECT_EQ(have.routing.expert, sums_on_cpu(call, 1, 1).routing.expert);
  }
}

TEST(RouteAtOnceOnGpu, SmallNansAreNamedAndAddNothing) {
  for (const char* router : kRouters) {
    SCOPED_TRACE(router);
    Call call(router, {50, 40, 2}, 4);
    const SumsCall whole(call, 1, 1);
    const RoutedSums without = whole.run();
    Call broken = call;
    broken.logits[47 * 40 + 1] = kNan;
    broken.logits[21 * 40 + 36] = kNan;
    broken.logits[21 * 40 + 33] = -kNan;
    const RoutedSums have = SumsCall(broken, 1, 1).run();
    EXPECT_EQ(have.routing.status.nan_logit, std::uint64_t{21} << 32 | 33U);
    const std::size_t columns = at(call.config.top_k());
    std::int64_t left_out = 0;
    for (std::size_t i = 0; i < have.routing.expert.size(); ++i) {
      const bool bad = i / columns == 21 || i / columns == 47;
      ASSERT_EQ(have.routing.expert[i], bad ? -1 : without.routing.expert[i]) << i;
      ASSERT_EQ(have.routing.weight[i], bad ? 0.0F : without.routing.weight[i]) << i;
      left_out += bad && without.routing.expert[i] >= 0 ? 1 : 0;
    }
    std::int64_t count = 0;
    double score = 0;
    for (std::size_t e = 0; e < 40; ++e) {
      count += without.sums.counts[e] - have.sums.counts[e];
      score += have.sums.scores[e];
    }
    EXPECT_EQ(count, left_out);
    EXPECT_NEAR(score, 48, 1e-4);
  }
}

TEST(RouteAtOnceOnGpu, RoutersWithoutAsManyLogitsAsExpertsAreRefused) {
  for (const char* router : {"adamoe", "hash"}) {
    const Call call(router, {4, 8, 2}, 1);
    HostSums sums(1, 8, 1);
    expect_error(ErrorCode::kInvalidArgument, "as many logits as experts",
                 [&] { route_at_once({.route = call.args(), .sums = sums.view()}); });
  }
}

}  // namespace
}  // namespace switchyard
