// A layer with each of the routers by name: gradients against differences of its own output, ranks
// against one, and what does not fit together.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "switchyard/comm.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"
#include "verify/problem.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using verify::Case;
using verify::Problem;

constexpr std::int64_t kHidden = 10;
constexpr std::int64_t kTokens = 12;
constexpr std::int32_t kExperts = 8;

/// A layer of one router, its gate apart so that it can be moved.
struct Layer {
  Problem problem;
  std::vector<float> gate;
  std::vector<float> noise_gate;  ///< Of learned noise.
  std::vector<float> tokens = random_floats(kTokens * kHidden, 1);
  std::vector<float> dout = random_floats(kTokens * kHidden, 2);
  std::vector<std::int32_t> ids{5, 9, 5, 100, 7, 40000, 1, 0, 3, 9, 2, 77};

  explicit Layer(const std::string& spelling) {
    Case test;
    test.seed = 5;
    test.layer.router =
        parse_router(spelling, {.num_experts = kExperts, .kind = TopKRouter{.top_k = 2}});
    test.layer.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = 6};
    problem = make_problem(test);
    const auto values = problem.model.gate.floats();
    gate.assign(values.begin(), values.end());
    problem.model.gate = Parameter(gate.data(), DType::kF32, std::ssize(gate), Backend::kCpu);
    const auto of_noise = problem.model.noise_gate.floats();
    noise_gate.assign(of_noise.begin(), of_noise.end());
    problem.model.noise_gate =
        Parameter(noise_gate.data(), DType::kF32, std::ssize(noise_gate), Backend::kCpu);
  }

  /// Rows of the gate.
  [[nodiscard]] std::int64_t gate_rows() const { return std::ssize(gate) / kHidden; }

  [[nodiscard]] RouteRequest request(std::int64_t first, std::int64_t count) const {
    return {.token_ids = {ids.data() + first, {count}},
            .seed = 3,
            .step = 4,
            .layer = 1,
            .first_token = first,
            .training = true};
  }

  static RawMatrix raw(std::vector<float>& values, std::int64_t first, std::int64_t rows) {
    return {reinterpret_cast<std::byte*>(values.data() + first * kHidden), DType::kF32, rows,
            kHidden};
  }

  /// out of tokens [first, first + count), as a rank has them.
  std::vector<float> forward(MoeLayer& layer, std::int64_t first = 0, std::int64_t count = kTokens,
                             SavedForward* saved = nullptr, RoutingRecord* record = nullptr) {
    std::vector<float> out(static_cast<std::size_t>(count * kHidden));
    RouteRequest of_call = request(first, count);
    of_call.record = record;
    layer.forward({.tokens = raw(tokens, first, count),
                   .out = raw(out, 0, count),
                   .request = of_call,
                   .saved = saved});
    return out;
  }

  /// sum of dout * out, and who was chosen.
  double loss(MoeLayer& layer, std::vector<std::int32_t>& chosen) {
    RoutingRecord record;
    const std::vector<float> out = forward(layer, 0, kTokens, nullptr, &record);
    chosen = record.expert;
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += double{dout[i]} * double{out[i]};
    return sum;
  }

  /// Where moving `value` to both sides leaves the choice as it is, the difference quotient must be
  /// `gradient`. Returns whether it did.
  bool agrees(MoeLayer& layer, float& value, float gradient, const char* name, std::size_t i) {
    constexpr float kStep = 1.0F / 256;
    const float middle = value;
    std::vector<std::int32_t> chosen[3];
    (void)loss(layer, chosen[0]);
    value = middle + kStep;
    const double above = loss(layer, chosen[1]);
    value = middle - kStep;
    const double below = loss(layer, chosen[2]);
    value = middle;
    if (chosen[0] != chosen[1] || chosen[0] != chosen[2]) return false;
    EXPECT_NEAR((above - below) / (2 * kStep), double{gradient}, 2e-3 * (1 + std::abs(gradient)))
        << name << "[" << i << "]";
    return true;
  }
};

TEST(LayerRouters, GradientsAreTheDifferencesOfTheOutputWithAllNoiseDrawn) {
  for (const char* spelling :
       {"top-k", "switch:jitter=0.3", "gshard", "gshard:sampled=yes,threshold=0.9", "v-moe:noise=1",
        "noisy-top-k", "adamoe:top-k=3,null-experts=5", "expert-threshold",
        "expert-choice:capacity-factor=1.5,group=6", "top-p:threshold=0.6", "relu", "chain",
        "chain:iterations=3,top-k=2,inner-residual=no", "chain:outer-residual=yes,score=sigmoid"}) {
    SCOPED_TRACE(spelling);
    Layer set(spelling);
    MoeLayer layer(set.problem.model, {});
    SavedForward saved;
    const std::vector<float> kept = set.forward(layer, 0, kTokens, &saved);
    EXPECT_EQ(kept, set.forward(layer));
    std::vector<float> dtokens(set.tokens.size());
    std::vector<float> dgate(set.gate.size());
    std::vector<float> dnoise_gate(set.noise_gate.size());
    layer.backward(
        {.saved = &saved,
         .dout = Layer::raw(set.dout, 0, kTokens),
         .dtokens = Layer::raw(dtokens, 0, kTokens),
         .dgate = Layer::raw(dgate, 0, set.gate_rows()),
         .dnoise_gate = dnoise_gate.empty() ? RawMatrix{} : Layer::raw(dnoise_gate, 0, kExperts)});
    std::size_t same = 0;
    for (std::size_t i = 0; i < dnoise_gate.size(); ++i) {
      same += set.agrees(layer, set.noise_gate[i], dnoise_gate[i], "dnoise_gate", i) ? 1 : 0;
    }
    for (std::size_t i = 0; i < dgate.size(); ++i) {
      same += set.agrees(layer, set.gate[i], dgate[i], "dgate", i) ? 1 : 0;
    }
    for (std::size_t i = 0; i < dtokens.size(); ++i) {
      same += set.agrees(layer, set.tokens[i], dtokens[i], "dtokens", i) ? 1 : 0;
    }
    EXPECT_GT(same, (dgate.size() + dnoise_gate.size() + dtokens.size()) / 2);
  }
}

TEST(LayerRouters, ReroutedTokensHaveTheGradientsOfTheExpertsThatTheyTook) {
  for (const char* spelling : {"top-k", "switch:jitter=0.3", "top-k:renormalize=no", "chain"}) {
    SCOPED_TRACE(spelling);
    Layer set(spelling);
    const LayerOptions options{.capacity_factor = 1, .drop_policy = DropPolicy::kReroute};
    MoeLayer layer(set.problem.model, options);
    MoeLayer free(set.problem.model, {});
    RoutingRecord record;
    RoutingRecord wanted;
    (void)set.forward(layer, 0, kTokens, nullptr, &record);
    (void)set.forward(free, 0, kTokens, nullptr, &wanted);
    EXPECT_NE(record.expert, wanted.expert);
    SavedForward saved;
    (void)set.forward(layer, 0, kTokens, &saved);
    std::vector<float> dgate(set.gate.size());
    std::vector<float> dtokens(set.tokens.size());
    layer.backward({.saved = &saved,
                    .dout = Layer::raw(set.dout, 0, kTokens),
                    .dtokens = Layer::raw(dtokens, 0, kTokens),
                    .dgate = Layer::raw(dgate, 0, set.gate_rows())});
    std::size_t same = 0;
    for (std::size_t i = 0; i < dgate.size(); ++i) {
      same += set.agrees(layer, set.gate[i], dgate[i], "dgate", i) ? 1 : 0;
    }
    for (std::size_t i = 0; i < dtokens.size(); ++i) {
      same += set.agrees(layer, set.tokens[i], dtokens[i], "dtokens", i) ? 1 : 0;
    }
    EXPECT_GT(same, (dgate.size() + dtokens.size()) / 2);
  }
  Layer set("top-k");
  LayerOptions options{.capacity_factor = 1, .drop_policy = DropPolicy::kReroute};
  MoeLayer layer(set.problem.model, options);
  const std::vector<std::int32_t> expert(2 * kTokens);
  const std::vector<float> weight(expert.size());
  std::vector<float> out(set.tokens.size());
  expect_error(ErrorCode::kInvalidArgument, "a routing is given, and drop_policy=reroute", [&] {
    layer.forward({.tokens = Layer::raw(set.tokens, 0, kTokens),
                   .out = Layer::raw(out, 0, kTokens),
                   .expert = {expert.data(), {kTokens, 2}},
                   .weight = {weight.data(), {kTokens, 2}}});
  });
  expect_error(ErrorCode::kInvalidArgument, "reroute with the router hash",
               [&] { MoeLayer(Layer("hash").problem.model, options); });
}

TEST(LayerRouters, ARuleWithoutLogitsTrainsItsExpertsAndNoGate) {
  for (const char* spelling : {"hash", "uniform", "round-robin", "zipf:s=1"}) {
    SCOPED_TRACE(spelling);
    Layer set(spelling);
    set.problem.model.gate = {};  // it needs none
    MoeLayer layer(set.problem.model, {});
    SavedForward saved;
    (void)set.forward(layer, 0, kTokens, &saved);
    EXPECT_EQ(saved.logits().data, nullptr);
    std::vector<float> dtokens(set.tokens.size());
    std::vector<float> dgate(set.gate.size());
    BackwardArgs args{.saved = &saved,
                      .dout = Layer::raw(set.dout, 0, kTokens),
                      .dtokens = Layer::raw(dtokens, 0, kTokens),
                      .dgate = Layer::raw(dgate, 0, kExperts)};
    expect_error(ErrorCode::kInvalidArgument, "has no logits", [&] { layer.backward(args); });
    args.dgate = {};
    layer.backward(args);
    for (std::size_t i = 0; i < dtokens.size(); ++i) {
      EXPECT_TRUE(set.agrees(layer, set.tokens[i], dtokens[i], "dtokens", i));
    }
  }
}

TEST(LayerRouters, RanksGiveTheBitsOfOne) {
  for (const char* spelling :
       {"switch:jitter=0.3", "gshard:sampled=yes", "v-moe:noise=1", "noisy-top-k", "adamoe",
        "moe++:top-k=3", "top-p", "relu", "hash", "uniform", "round-robin", "chain:iterations=3"}) {
    SCOPED_TRACE(spelling);
    const auto step = [](Layer& set, MoeLayer& layer, std::int64_t first, std::int64_t count) {
      SavedForward saved;
      std::vector<float> both = set.forward(layer, first, count, &saved);
      std::vector<float> dtokens(both.size());
      layer.backward({.saved = &saved,
                      .dout = Layer::raw(set.dout, first, count),
                      .dtokens = Layer::raw(dtokens, 0, count)});
      both.insert(both.end(), dtokens.begin(), dtokens.end());
      return both;
    };
    Layer alone(spelling);
    MoeLayer one(alone.problem.model, {});
    const std::vector<float> want = step(alone, one, 0, kTokens);
    for (const int ranks : {2, 4}) {
      const std::int64_t count = kTokens / ranks;
      const auto size = static_cast<std::size_t>(count * kHidden);
      std::vector<std::vector<float>> parts(static_cast<std::size_t>(ranks));
      run_ranks(
          ranks,
          [&](Communicator& communicator) {
            Layer set(spelling);
            MoeLayer layer(set.problem.model, {.max_tokens = count}, &communicator);
            parts[static_cast<std::size_t>(communicator.rank())] =
                step(set, layer, communicator.rank() * count, count);
          },
          std::chrono::milliseconds(20000));
      for (std::size_t r = 0; r < parts.size(); ++r) {
        for (std::size_t i = 0; i < size; ++i) {
          ASSERT_EQ(parts[r][i], want[r * size + i]) << "out, rank " << r << " of " << ranks;
          ASSERT_EQ(parts[r][size + i], want[alone.tokens.size() + r * size + i])
              << "dtokens, rank " << r << " of " << ranks;
        }
      }
    }
  }
}

TEST(LayerRouters, TheNoiseGatesGradientIsSummedOverRanksAndZeroWithoutTraining) {
  const auto gradient = [](Layer& set, MoeLayer& layer, std::int64_t first, std::int64_t count,
                           bool training) {
    SavedForward saved;
    std::vector<float> out(static_cast<std::size_t>(count * kHidden));
    RouteRequest request = set.request(first, count);
    request.training = training;
    layer.forward({.tokens = Layer::raw(set.tokens, first, count),
                   .out = Layer::raw(out, 0, count),
                   .request = request,
                   .saved = &saved});
    std::vector<float> dnoise_gate(set.noise_gate.size(), -7.0F);
    layer.backward({.saved = &saved,
                    .dout = Layer::raw(set.dout, first, count),
                    .dnoise_gate = Layer::raw(dnoise_gate, 0, kExperts)});
    return dnoise_gate;
  };
  Layer alone("noisy-top-k");
  MoeLayer one(alone.problem.model, {});
  EXPECT_EQ(gradient(alone, one, 0, kTokens, false), std::vector<float>(alone.gate.size(), 0.0F));
  const std::vector<float> want = gradient(alone, one, 0, kTokens, true);
  run_ranks(
      2,
      [&](Communicator& communicator) {
        Layer set("noisy-top-k");
        MoeLayer layer(set.problem.model, {.max_tokens = kTokens / 2}, &communicator);
        const std::vector<float> have =
            gradient(set, layer, communicator.rank() * kTokens / 2, kTokens / 2, true);
        for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(have[i], want[i], 1e-5F);
      },
      std::chrono::milliseconds(20000));
}

TEST(LayerRouters, ANoiseGateGoesWithLearnedNoise) {
  Layer set("top-k");
  LayerModel model = set.problem.model;
  use_router(model, parse_router("noisy-top-k", model.config.router));
  EXPECT_EQ(model.noise_gate.widened(), std::vector<float>(set.gate.size(), 0.0F));
  LayerModel without = model;
  without.noise_gate = {};
  expect_error(ErrorCode::kInvalidArgument, "noise_gate has 0 values, want 80",
               [&] { MoeLayer(without, {}); });
  use_router(model, parse_router("v-moe", model.config.router));
  EXPECT_TRUE(model.noise_gate.empty());
  model.noise_gate = std::vector<float>(set.gate.size());
  expect_error(ErrorCode::kInvalidArgument, "noise_gate has 80 values, want 0",
               [&] { MoeLayer(model, {}); });
  MoeLayer layer(set.problem.model, {});
  SavedForward saved;
  (void)set.forward(layer, 0, kTokens, &saved);
  std::vector<float> dnoise_gate(set.gate.size());
  expect_error(ErrorCode::kInvalidArgument, "noise is not learned", [&] {
    layer.backward({.saved = &saved,
                    .dout = Layer::raw(set.dout, 0, kTokens),
                    .dnoise_gate = Layer::raw(dnoise_gate, 0, kExperts)});
  });
}

TEST(LayerRouters, NullExpertsHaveRowsOfZerosWhereTheModelHasNone) {
  Layer set("top-k");
  LayerModel model = set.problem.model;
  model.router_bias = std::vector<float>(kExperts, 0.5F);
  use_router(model, parse_router("adamoe:null-experts=3", model.config.router));
  std::vector<float> want = set.gate;
  want.resize((kExperts + 3) * kHidden);
  EXPECT_EQ(model.gate.widened(), want);
  EXPECT_EQ(model.router_bias.size(), kExperts + 3);
  EXPECT_EQ(model.router_bias.floats()[kExperts], 0.0F);
  MoeLayer layer(model, {});
  (void)set.forward(layer);
  LayerModel without = model;
  without.gate = set.problem.model.gate;
  expect_error(ErrorCode::kInvalidArgument, "gate has 80 values, want 110",
               [&] { MoeLayer(without, {}); });
  expect_error(ErrorCode::kUnsupported, "losses of a layer do not know null experts",
               [&] { MoeLayer(model, {.losses = {.balance = 1}}); });
  use_router(model, parse_router("relu", model.config.router));
  EXPECT_EQ(model.gate.widened(), set.gate);
}

TEST(LayerRouters, CapacityLimitsRulesThatHaveAKAndIsRefusedByThoseWithout) {
  for (const char* spelling : {"switch", "gshard", "v-moe", "adamoe", "hash", "uniform", "zipf"}) {
    SCOPED_TRACE(spelling);
    for (const DropPolicy policy :
         {DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs, DropPolicy::kBpr}) {
      Layer set(spelling);
      MoeLayer layer(set.problem.model, {.capacity_factor = 0.5, .drop_policy = policy});
      RoutingRecord record;
      (void)set.forward(layer, 0, kTokens, nullptr, &record);
      const std::int64_t capacity =
          capacity_of(0.5, kTokens, set.problem.model.config.router.top_k(), kExperts);
      for (std::size_t e = 0; e < record.counts.size(); ++e) {
        EXPECT_EQ(record.counts_kept[e], std::min(record.counts[e], capacity));
      }
    }
  }
  for (const char* spelling : {"expert-choice", "expert-threshold", "top-p", "relu"}) {
    Layer set(spelling);
    const auto make = [&] { MoeLayer(set.problem.model, {.capacity_factor = 1.25}); };
    expect_error(ErrorCode::kInvalidArgument, "capacity_factor=1.25", make);
    expect_error(ErrorCode::kInvalidArgument, spelling, make);
  }
}

TEST(LayerRouters, AnotherRouterTakesTheModelsGateAndLeavesItsSelectionBias) {
  Layer set("top-k");
  set.problem.model.selection_bias = std::vector<float>(kExperts, 0.5F);
  LayerModel model = set.problem.model;
  use_router(model, parse_router("relu", model.config.router));
  EXPECT_TRUE(model.selection_bias.empty());
  MoeLayer layer(model, {});
  Layer relu("relu");
  MoeLayer want(relu.problem.model, {});
  EXPECT_EQ(set.forward(layer), relu.forward(want));
  expect_error(ErrorCode::kInvalidArgument, "the router has 4 experts, the layer 8",
               [&] { use_router(model, {.num_experts = 4, .kind = TopKRouter{.top_k = 2}}); });
}

}  // namespace
}  // namespace switchyard
