// Chain-of-Experts in a layer: its definition in double, its iterations as layers of their own, and
// what does not fit together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "reference/expert.hpp"
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

constexpr std::int64_t kHidden = 8;
constexpr std::int64_t kInner = 5;
constexpr std::int64_t kTokens = 9;
constexpr std::int32_t kExperts = 6;

RouterConfig chain_of(const std::string& spelling) {
  return parse_router(spelling, {.num_experts = kExperts, .kind = TopKRouter{.top_k = 4}});
}

Problem problem_of(const RouterConfig& router) {
  Case test;
  test.seed = 11;
  test.router_bias = true;
  test.layer.router = router;
  test.layer.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = kInner};
  return verify::make_problem(test);
}

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

RawMatrix raw(std::vector<float>& values, std::int64_t cols = kHidden) {
  return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, std::ssize(values) / cols,
          cols};
}

std::vector<float> run(MoeLayer& layer, std::vector<float> tokens, RoutingRecord* record = nullptr,
                       RouteRequest request = {}) {
  std::vector<float> out(tokens.size());
  request.record = record;
  layer.forward({.tokens = raw(tokens), .out = raw(out), .request = request});
  return out;
}

/// One iteration of a token in double: softmax over its K best logits, gated experts of silu.
std::vector<double> iteration_in_double(const Problem& problem, std::int64_t c,
                                        const std::vector<double>& x, std::int64_t top_k) {
  const auto gate = problem.model.gate.floats();
  const auto bias = problem.model.router_bias.floats();
  std::vector<std::pair<double, std::int64_t>> best;  // minus the logit, expert
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const std::int64_t row = c * kExperts + e;
    auto logit = double{bias[at(row)]};
    for (std::int64_t h = 0; h < kHidden; ++h) {
      logit += double{gate[at(row * kHidden + h)]} * x[at(h)];
    }
    best.emplace_back(-logit, e);
  }
  std::sort(best.begin(), best.end());
  double sum = 0;
  for (std::int64_t k = 0; k < top_k; ++k) sum += std::exp(best[0].first - best[at(k)].first);
  std::vector<double> y(at(kHidden));
  for (std::int64_t k = 0; k < top_k; ++k) {
    const auto [logit, e] = best[at(k)];
    const double weight = std::exp(best[0].first - logit) / sum;
    const ExpertConfig& config = problem.model.config.experts;
    const auto matrices = reference::read_expert(
        config, *problem.model.experts, static_cast<std::int32_t>(e), {.compute = DType::kF32});
    const auto row = reference::expert_row(config, matrices, x, {.compute = DType::kF32});
    for (std::size_t h = 0; h < y.size(); ++h) y[h] += weight * row[h].value;
  }
  return y;
}

TEST(Chain, ItsOutputIsTheDefinitionInDoubleWithEachResidual) {
  for (const bool inner : {true, false}) {
    for (const bool outer : {true, false}) {
      for (const std::int32_t iterations : {1, 2, 3}) {
        RouterConfig router = chain_of("chain:top-k=2");
        router.chain = {iterations, inner, outer};
        const Problem problem = problem_of(router);
        MoeLayer layer(problem.model, {});
        const std::vector<float> tokens = random_floats(kTokens * kHidden, 3);
        const std::vector<float> out = run(layer, tokens);
        for (std::int64_t t = 0; t < kTokens; ++t) {
          const std::vector<double> first(tokens.begin() + t * kHidden,
                                          tokens.begin() + (t + 1) * kHidden);
          std::vector<double> x = first;
          for (std::int32_t c = 0; c < iterations; ++c) {
            const std::vector<double> y = iteration_in_double(problem, c, x, 2);
            for (std::size_t h = 0; h < x.size(); ++h) x[h] = inner ? x[h] + y[h] : y[h];
          }
          for (std::int64_t h = 0; h < kHidden; ++h) {
            const double want = outer ? x[at(h)] + first[at(h)] : x[at(h)];
            EXPECT_NEAR(double{out[at(t * kHidden + h)]}, want, 2e-5 * (1 + std::abs(want)));
          }
        }
      }
    }
  }
}

TEST(Chain, AnIterationDrawsAsALayerOfItsOwn) {
  RouterConfig router = parse_router("v-moe:noise=1,top-k=2", chain_of("top-k"));
  router.chain = {.iterations = 3};
  const Problem problem = problem_of(router);
  MoeLayer layer(problem.model, {});
  const std::vector<float> tokens = random_floats(kTokens * kHidden, 4);
  RouteRequest request{.seed = 7, .step = 2, .layer = 5, .training = true};
  RoutingRecord record;
  const std::vector<float> out = run(layer, tokens, &record, request);
  std::vector<float> x = tokens;
  std::vector<std::int32_t> expert;
  for (std::int32_t c = 0; c < 3; ++c) {
    MoeLayer one(iteration_of(problem.model, c), {});
    request.layer = 5 * 3 + c;
    RoutingRecord part;
    const std::vector<float> y = run(one, x, &part, request);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
    expert.insert(expert.end(), part.expert.begin(), part.expert.end());
  }
  EXPECT_EQ(out, x);
  EXPECT_EQ(record.expert, expert);
  std::int64_t sum = 0;
  for (const std::int64_t count : record.counts) sum += count;
  EXPECT_EQ(sum, 3 * kTokens * 2);
  EXPECT_EQ(layer.rows_used(), 3 * kTokens * 2);
}

/// The layers of the iterations by hand, each with its own losses: forward, then back.
TEST(Chain, LossesAreThoseOfEachIterationAndTheirSums) {
  const Problem problem = problem_of(chain_of("chain:iterations=3,top-k=2"));
  const LayerOptions options{.losses = {.balance = 0.5, .z = 0.25}};
  constexpr double kScale = 0.5;
  std::vector<float> x = random_floats(kTokens * kHidden, 6);
  std::vector<float> dx = random_floats(kTokens * kHidden, 7);
  std::vector<float> out(x.size()), dtokens(x.size()), dgate(at(3 * kExperts * kHidden));
  MoeLayer layer(problem.model, options);
  SavedForward saved;
  layer.forward({.tokens = raw(x), .out = raw(out), .saved = &saved});
  const std::vector<double> values(saved.losses().data, saved.losses().data + kLossValues);
  const Matrix<const std::int64_t> counts = saved.counts();
  ASSERT_EQ(counts.size(), kExperts);
  const std::vector<std::int64_t> all(counts.data, counts.data + kExperts);
  BackwardArgs back{
      .saved = &saved, .dout = raw(dx), .loss_scale = kScale, .dtokens = raw(dtokens)};
  back.dgate = raw(dgate);
  layer.backward(back);
  EXPECT_EQ(values, std::vector<double>(saved.losses().data, saved.losses().data + kLossValues));

  std::vector<MoeLayer> layers;
  std::vector<SavedForward> kept(3);
  std::vector<double> sums(at(kLossValues));
  std::vector<std::int64_t> summed(at(kExperts));
  for (std::int32_t c = 0; c < 3; ++c) {
    MoeLayer& one = layers.emplace_back(iteration_of(problem.model, c), options);
    std::vector<float> y(x.size());
    one.forward({.tokens = raw(x), .out = raw(y), .saved = &kept[at(c)]});
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += kept[at(c)].losses().data[i];
    for (std::size_t e = 0; e < summed.size(); ++e) summed[e] += kept[at(c)].counts().data[e];
  }
  EXPECT_EQ(out, x);
  EXPECT_EQ(values, sums);
  EXPECT_EQ(all, summed);
  std::vector<float> of_gates(dgate.size());
  for (std::int32_t c = 2; c >= 0; --c) {
    std::vector<float> part(dx.size()), of_gate(at(kExperts * kHidden));
    BackwardArgs one{
        .saved = &kept[at(c)], .dout = raw(dx), .loss_scale = kScale, .dtokens = raw(part)};
    one.dgate = raw(of_gate);
    layers[at(c)].backward(one);
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] += part[i];
    std::copy(of_gate.begin(), of_gate.end(), of_gates.begin() + c * kExperts * kHidden);
  }
  EXPECT_EQ(dtokens, dx);
  EXPECT_EQ(dgate, of_gates);
  layer.forward({.tokens = raw(x), .out = raw(out), .saved = &saved});
  const std::vector<std::int64_t> given(at(kExperts), 1);
  back.loss_counts = {given.data(), {kExperts}};
  expect_error(ErrorCode::kInvalidArgument, "loss_counts are given, but the router chain",
               [&] { layer.backward(back); });
  MoeLayer global(problem.model, {.losses = {.balance = 1, .scope = LossScope::kGlobal}});
  global.forward({.tokens = raw(x), .out = raw(out), .saved = &saved});
  back.loss_counts = {};
  expect_error(ErrorCode::kInvalidArgument,
               "losses of scope global and the router chain on one rank",
               [&] { global.backward(back); });
}

TEST(Chain, ACheckpointsGateIsThatOfEachIterationUntilTheChainGoes) {
  const Problem problem = problem_of(chain_of("top-k:top-k=2"));
  LayerModel model = problem.model;
  const std::vector<float> gate = model.gate.widened();
  use_router(model, chain_of("chain:iterations=3"));
  EXPECT_EQ(model.config.router.top_k(), 2);  // of the model's 4 by 3 iterations
  std::vector<float> want = gate;
  for (int c = 1; c < 3; ++c) want.insert(want.end(), gate.begin(), gate.end());
  EXPECT_EQ(model.gate.widened(), want);
  EXPECT_EQ(model.router_bias.size(), 3 * kExperts);
  use_router(model, chain_of("top-k:top-k=2"));
  EXPECT_EQ(model.gate.widened(), gate);
  const std::vector<float> tokens = random_floats(kTokens * kHidden, 5);
  MoeLayer before(problem.model, {});
  MoeLayer after(model, {});
  EXPECT_EQ(run(before, tokens), run(after, tokens));
}

TEST(Chain, NoTokensAreNoWork) {
  const Problem problem = problem_of(chain_of("chain"));
  MoeLayer layer(problem.model, {});
  EXPECT_TRUE(run(layer, {}).empty());
}

TEST(Chain, WhatDoesNotFitIsRefusedByName) {
  const auto bad = ErrorCode::kInvalidArgument;
  for (const auto& [spelling, words] :
       {std::pair("chain:iterations=0", "iterations='0', want a whole number from 1"),
        std::pair("chain:iterations=2000", "iterations='2000'"),
        std::pair("chain:inner-residual=1", "inner-residual='1' is not one of yes|no"),
        std::pair("chain:top-k=7", "router chain: top_k=7 exceeds num_experts=6"),
        std::pair("chain:gates=2", "router chain has no option 'gates'")}) {
    expect_error(bad, words, [&, text = spelling] { (void)chain_of(text); });
  }
  RouterConfig router = chain_of("hash");
  router.chain.iterations = 2;
  expect_error(bad, "router hash, which has no logits", [&] { check(router); });
  router = chain_of("noisy-top-k");
  router.chain.iterations = 2;
  expect_error(bad, "with learned noise", [&] { check(router); });
  router = chain_of("top-k");
  router.chain.iterations = -1;
  expect_error(bad, "iterations=-1 of a chain", [&] { check(router); });

  const Problem problem = problem_of(chain_of("chain:iterations=2"));
  expect_error(bad, "iteration 2 of a chain of 2", [&] { (void)iteration_of(problem.model, 2); });
  LayerModel model = problem.model;
  model.gate = random_floats(kExperts * kHidden, 1);
  expect_error(bad, "gate has 48 values, want 96", [&] { MoeLayer(model, {}); });

  MoeLayer layer(problem.model, {});
  std::vector<float> tokens = random_floats(kTokens * kHidden, 2);
  std::vector<float> out(tokens.size());
  const std::vector<std::int32_t> expert(at(kTokens * 2));
  const std::vector<float> weight(expert.size());
  ForwardArgs args{.tokens = raw(tokens), .out = raw(out)};
  args.expert = {expert.data(), {kTokens, 2}};
  args.weight = {weight.data(), {kTokens, 2}};
  expect_error(bad, "a routing is given, but the router chain makes iterations=2",
               [&] { layer.forward(args); });
  args.expert = {};
  args.weight = {};
  args.request.top_score = {out.data(), {kTokens}};
  expect_error(bad, "top_score is asked for", [&] { layer.forward(args); });
  args.request = {};
  SavedForward saved;
  args.saved = &saved;
  layer.forward(args);
  EXPECT_EQ(saved.logits().data, nullptr);
  EXPECT_GT(saved.bytes(), 0);
  std::vector<float> dweight(at(kTokens * 2));
  std::vector<float> dgate(at(2 * kHidden * kExperts));
  BackwardArgs back{.saved = &saved, .dout = raw(tokens)};
  back.dweight = {dweight.data(), {kTokens, 2}};
  expect_error(bad, "dlogits or dweight are given", [&] { layer.backward(back); });
  back.dweight = {};
  back.dgate = {reinterpret_cast<std::byte*>(dgate.data()), DType::kF32, kExperts, kHidden};
  expect_error(bad, "dgate is [6, 8], want [12, 8]", [&] { layer.backward(back); });
  back.dgate = raw(dgate);
  MoeLayer other(problem.model, {});
  expect_error(bad, "another layer's", [&] { other.backward(back); });
  layer.backward(back);
  expect_error(bad, "a backward has used this", [&] { layer.backward(back); });
}

}  // namespace
}  // namespace switchyard
