// PERFT's adapters: numpy's numbers, the reference in double and its differences, and what must
// hold of adapters beside a frozen layer.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "switchyard/layer.hpp"
#include "switchyard/names.hpp"
#include "testkit/expect_error.hpp"
#include "tests/layer/perft_case.hpp"

namespace switchyard::test {
namespace {

/// All kinds, of ranks 4 to 64, each with made-up numbers.
std::vector<PerftCase> some_cases() {
  std::vector<PerftCase> cases{
      {.config = {.num_adapters = 4, .hidden = 10, .rank = 4, .router = top_k(4, 2)},
       .num_tokens = 7},
      {.config = {.num_adapters = 3,
                  .hidden = 9,
                  .rank = 5,
                  .alpha = 7,
                  .activation = Activation::kGelu,
                  .router = top_k(3, 2, true)},
       .num_tokens = 6},
      {.config = {.kind = PerftKind::kEmbedded,
                  .num_adapters = 5,
                  .hidden = 11,
                  .rank = 8,
                  .router = top_k(5, 3)},
       .num_tokens = 8},
      {.config = {.kind = PerftKind::kDense,
                  .num_adapters = 3,
                  .hidden = 8,
                  .rank = 4,
                  .alpha = 4,
                  .activation = Activation::kSilu},
       .num_tokens = 5},
      {.config = {.kind = PerftKind::kShared, .hidden = 12, .rank = 64, .alpha = 128},
       .num_tokens = 4},
  };
  std::uint64_t seed = 1;
  for (PerftCase& c : cases) c.fill(seed++);
  return cases;
}

TEST(Perft, OutputsAndGradientsAreThoseOfNumpy) {
  std::ifstream file(SWITCHYARD_TEST_DATA "/perft_golden.json");
  const nlohmann::json document = nlohmann::json::parse(file);
  ASSERT_EQ(document.size(), 7U);
  constexpr PerftKind kKinds[] = {PerftKind::kRouted, PerftKind::kEmbedded, PerftKind::kDense,
                                  PerftKind::kShared};
  for (const auto& [name, entry] : document.items()) {
    SCOPED_TRACE(name);
    const auto& given = entry.at("given");
    const std::string kind = entry.at("kind");
    PerftCase c;
    c.config.kind = *std::find_if(std::begin(kKinds), std::end(kKinds),
                                  [&](PerftKind one) { return kind == to_string(one); });
    c.config.num_adapters = entry.at("adapters");
    c.config.hidden = entry.at("hidden");
    c.config.rank = entry.at("rank");
    c.config.alpha = entry.at("alpha");
    c.config.activation = *parse<Activation>(std::string(entry.value("activation", "identity")));
    c.config.router =
        top_k(c.config.num_adapters, entry.value("top_k", 1), entry.value("renormalize", false));
    c.num_tokens = entry.at("tokens");
    c.x = given.at("x").get<Floats>();
    c.base = given.at("base").get<Floats>();
    c.a = given.at("a").get<Floats>();
    c.b = given.at("b").get<Floats>();
    c.gate = given.value("gate", Floats{});
    c.weight = given.value("weight", Floats{});
    c.dy = entry.at("dy").get<Floats>();
    c.expert = entry.at("expert").get<std::vector<std::int32_t>>();
    const Doubles y = entry.at("y");
    const Doubles of_reference = reference::perft(c.in_double()).y;
    for (std::size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(of_reference[i], y[i], 1e-8);
    const PerftResults r = run_perft(c);
    const auto& gradients = entry.at("gradients");
    expect_near(r.y, y, 2e-6, "y");
    expect_near(r.dx, gradients.at("x"), 3e-6, "dx");
    expect_near(r.da, gradients.at("a"), 3e-6, "da");
    expect_near(r.db, gradients.at("b"), 3e-6, "db");
    expect_near(r.dgate, gradients.value("gate", Doubles{}), 3e-6, "dgate");
    expect_near(r.dweight, gradients.value("weight", Doubles{}), 3e-6, "dweight");
  }
}

TEST(Perft, OutputsAreThoseOfTheReferenceAndGradientsItsDifferences) {
  using Problem = reference::PerftProblem;
  for (PerftCase c : some_cases()) {
    SCOPED_TRACE(to_string(c.config.kind));
    const PerftResults r = run_perft(c);
    expect_near(r.y, reference::perft(c.in_double()).y, 2e-6, "y");
    expect_near(r.dx, differences(c, &Problem::x), 1e-5, "dx");
    expect_near(r.da, differences(c, &Problem::a), 1e-5, "da");
    expect_near(r.db, differences(c, &Problem::b), 1e-5, "db");
    expect_near(r.dgate, differences(c, &Problem::gate), 1e-5, "dgate");
    Doubles dweight = differences(c, &Problem::weight);
    expect_near(r.dweight, dweight, 1e-5, "dweight");
    c.compute = DType::kBF16;
    expect_near(run_perft(c).y, reference::perft(c.in_double()).y, 5e-2, "y of bf16");
  }
}

/// A layer of plain experts without a nonlinearity, W13 [E, I, H] and W2 [E, H, I], and its router.
struct LinearLayer {
  std::int64_t inner;
  Floats w13, w2;
};

/// Back through a layer with all that it is asked for.
struct LayerGradients {
  Floats y, dx, dw13, dw2;
};

LayerModel model_of(const LinearLayer& layer, const PerftCase& c, const Floats& gate) {
  const ExpertConfig experts{.num_experts = c.config.num_adapters,
                             .hidden = c.config.hidden,
                             .inner = layer.inner,
                             .gated = false,
                             .activation = Activation::kIdentity};
  LayerModel model{.config = {.router = c.config.router, .experts = experts}, .gate = gate};
  model.experts = make_memory_source(experts, DType::kF32, layer.w13.data(), layer.w2.data());
  return model;
}

// An expert without a nonlinearity and the adapter in it are one expert, of their widths together.
TEST(Perft, AFrozenLayerWithEmbeddedAdaptersIsTheLayerOfWiderExperts) {
  PerftCase c{.config = {.kind = PerftKind::kEmbedded,
                         .num_adapters = 4,
                         .hidden = 8,
                         .rank = 3,
                         .alpha = 6,
                         .router = top_k(4, 2)},
              .num_tokens = 12};
  c.fill(20);
  const std::int64_t experts = 4, hidden = 8, inner = 5, rank = 3, wide = inner + rank;
  Random random(21);
  const auto draw = [&](std::int64_t count) {
    Floats values(at(count));
    for (float& value : values) value = static_cast<float>(0.5 * random.normal());
    return values;
  };
  const Floats gate = draw(experts * hidden);
  const LinearLayer frozen{inner, draw(experts * inner * hidden), draw(experts * hidden * inner)};
  LinearLayer both{wide, {}, {}};
  for (std::int64_t e = 0; e < experts; ++e) {
    const auto add = [](Floats& to, const Floats& from, std::int64_t first, std::int64_t count,
                        float scale) {
      for (std::int64_t i = first; i < first + count; ++i) to.push_back(scale * from[at(i)]);
    };
    add(both.w13, frozen.w13, e * inner * hidden, inner * hidden, 1);
    add(both.w13, c.a, e * rank * hidden, rank * hidden, 1);
    for (std::int64_t h = e * hidden; h < (e + 1) * hidden; ++h) {
      add(both.w2, frozen.w2, h * inner, inner, 1);
      add(both.w2, c.b, h * rank, rank, c.config.scale());
    }
  }
  const auto floats = [](std::int64_t count) { return Floats(at(count), 1e30F); };

  LayerGradients want{floats(12 * hidden), floats(12 * hidden), floats(std::ssize(both.w13)),
                      floats(std::ssize(both.w2))};
  MoeLayer wider(model_of(both, c, gate), {});
  SavedForward saved_wider;
  wider.forward(
      {.tokens = raw_of(c.x, hidden), .out = raw_of(want.y, hidden), .saved = &saved_wider});
  wider.backward({.saved = &saved_wider,
                  .dout = raw_of(c.dy, hidden),
                  .dtokens = raw_of(want.dx, hidden),
                  .experts = {.w13 = raw_of(want.dw13, hidden), .w2 = raw_of(want.dw2, wide)}});

  // As a caller goes through a frozen layer: adapters first, then by dlogits through its gate.
  MoeLayer layer(model_of(frozen, c, gate), {});
  PerftAdapters adapters(c.model());
  SavedForward saved_layer, saved;
  RoutingRecord routing;
  Floats y = floats(12 * hidden), dx = y, da = c.a, db = c.b, dweight = floats(24);
  layer.forward({.tokens = raw_of(c.x, hidden),
                 .out = raw_of(y, hidden),
                 .request = {.record = &routing},
                 .saved = &saved_layer});
  adapters.forward({.tokens = raw_of(c.x, hidden),
                    .base = raw_of(y, hidden),
                    .out = raw_of(y, hidden),
                    .expert = {routing.expert.data(), {12, 2}},
                    .weight = {routing.weight.data(), {12, 2}},
                    .saved = &saved});
  adapters.backward({.saved = &saved,
                     .dout = raw_of(c.dy, hidden),
                     .dtokens = raw_of(dx, hidden),
                     .dweight = {dweight.data(), {12, 2}},
                     .da = raw_of(da, hidden),
                     .db = raw_of(db, rank)});
  Floats dlogits = floats(12 * experts), through = dx;
  route_backward({.logits = saved_layer.logits(),
                  .expert = {routing.expert.data(), {12, 2}},
                  .dweight = {dweight.data(), {12, 2}},
                  .config = c.config.router,
                  .dlogits = {dlogits.data(), {12, experts}}});
  layer.backward({.saved = &saved_layer,
                  .dout = raw_of(c.dy, hidden),
                  .dlogits = {dlogits.data(), {12, experts}},
                  .dtokens = raw_of(through, hidden)});
  std::transform(dx.begin(), dx.end(), through.begin(), dx.begin(), std::plus<>());

  const auto doubles = [](const Floats& values) { return Doubles(values.begin(), values.end()); };
  expect_near(y, doubles(want.y), 2e-6, "y");
  expect_near(dx, doubles(want.dx), 3e-6, "dx");
  Doubles want_da, want_db;
  for (std::int64_t e = 0; e < experts; ++e) {
    const auto of_a = want.dw13.begin() + (e * wide + inner) * hidden;
    want_da.insert(want_da.end(), of_a, of_a + rank * hidden);
    for (std::int64_t h = e * hidden; h < (e + 1) * hidden; ++h) {
      for (std::int64_t i = inner; i < wide; ++i) {
        want_db.push_back(double{c.config.scale()} * double{want.dw2[at(h * wide + i)]});
      }
    }
  }
  expect_near(da, want_da, 3e-6, "da");
  expect_near(db, want_db, 3e-6, "db");
}

TEST(Perft, AdaptersWithoutBLeaveTheLayersBitsAndLearnBAlone) {
  for (PerftCase c : some_cases()) {
    std::fill(c.b.begin(), c.b.end(), 0.0F);
    const PerftResults r = run_perft(c);
    EXPECT_EQ(r.y, c.base);
    EXPECT_TRUE(std::all_of(r.da.begin(), r.da.end(), [](float v) { return v == 0; }));
    EXPECT_TRUE(std::any_of(r.db.begin(), r.db.end(), [](float v) { return v != 0; }));
  }
}

TEST(Perft, OneAdapterIsTheSameOfEveryKind) {
  PerftCase c = some_cases()[4];
  const Floats want = run_perft(c).y;
  c.config.kind = PerftKind::kDense;
  EXPECT_EQ(run_perft(c).y, want);
  c.config.router = top_k(1, 1, true);
  c.config.kind = PerftKind::kEmbedded;
  c.expert.assign(at(c.num_tokens), 0);
  c.weight.assign(at(c.num_tokens), 1.0F);
  EXPECT_EQ(run_perft(c).y, want);
  c.config.kind = PerftKind::kRouted;
  c.gate.assign(at(c.config.hidden), 0.5F);
  EXPECT_EQ(run_perft(c).y, want);
  c.config.router.kind = TopPRouter{.threshold = 1};
  EXPECT_EQ(run_perft(c).y, want);
}

TEST(Perft, WhatTheLayerHasDroppedHasNoAdapter) {
  PerftCase c = some_cases()[2], dropped = c;
  for (std::size_t i = 0; i < c.expert.size(); ++i) {
    dropped.kept.push_back(i % 3 == 0 ? 0 : 1);
    if (i % 3 == 0) c.expert[i] = -1;
  }
  EXPECT_TRUE(run_perft(dropped) == run_perft(c));
}

TEST(Perft, BitsDoNotDependOnThreadsOrOnWhatIsKept) {
  for (PerftCase c : some_cases()) {
    const PerftResults want = run_perft(c);
    c.threads = 3;
    EXPECT_TRUE(run_perft(c) == want);
    c.recompute = Recompute::kActivationInput;
    EXPECT_TRUE(run_perft(c) == want);
  }
}

TEST(Perft, OverRanksOutputsHaveTheBitsOfOneAndGradientsAreSumsAlikeOnAll) {
  for (PerftCase c : some_cases()) {
    const PerftResults want = run_perft(c);
    for (const int ranks : {2, 4, 8}) {
      for (const bool accumulate : {false, true}) {
        c.accumulate = accumulate;
        std::vector<PerftResults> of(at(ranks));
        run_ranks(ranks, [&](Communicator& communicator) {
          const int r = communicator.rank();
          of[at(r)] = run_perft(c, r * c.num_tokens / ranks, (r + 1) * c.num_tokens / ranks,
                                &communicator, accumulate ? 2.0F : 1e30F);
        });
        Floats y, dx, dweight;
        for (const PerftResults& r : of) {
          y.insert(y.end(), r.y.begin(), r.y.end());
          dx.insert(dx.end(), r.dx.begin(), r.dx.end());
          dweight.insert(dweight.end(), r.dweight.begin(), r.dweight.end());
          EXPECT_TRUE(r.da == of[0].da && r.db == of[0].db && r.dgate == of[0].dgate);
        }
        EXPECT_TRUE(y == want.y && dx == want.dx && dweight == want.dweight) << ranks;
        const auto plus = [&](const Floats& values) {
          Doubles result(values.begin(), values.end());
          for (double& value : result) value += accumulate ? 2.0 : 0.0;
          return result;
        };
        expect_near(of[0].da, plus(want.da), 2e-6, "da");
        expect_near(of[0].db, plus(want.db), 2e-6, "db");
        expect_near(of[0].dgate, plus(want.dgate), 2e-6, "dgate");
      }
    }
  }
}

TEST(Perft, RanksMayAskForDifferentGradientsAndNewNumbersCountOnceReloaded) {
  PerftCase c = some_cases()[0];
  const PerftResults want = run_perft(c);
  run_ranks(2, [&](Communicator& communicator) {
    PerftAdapters adapters(c.model(), {}, &communicator);
    SavedForward saved;
    Floats y(c.x.size()), da(c.a.size()), db(c.b.size());
    const std::int64_t hidden = c.config.hidden;
    const std::int64_t tokens = communicator.rank() == 0 ? c.num_tokens : 0;
    adapters.forward({.tokens = {raw_of(c.x, hidden).data, DType::kF32, tokens, hidden},
                      .out = {raw_of(y, hidden).data, DType::kF32, tokens, hidden},
                      .saved = &saved});
    PerftBackwardArgs back{.saved = &saved,
                           .dout = {raw_of(c.dy, hidden).data, DType::kF32, tokens, hidden}};
    (communicator.rank() == 0 ? back.da : back.db) =
        communicator.rank() == 0 ? raw_of(da, hidden) : raw_of(db, c.config.rank);
    adapters.backward(back);
    const bool first = communicator.rank() == 0;
    EXPECT_EQ(first ? da : db, first ? want.da : want.db);
  });
  PerftAdapters adapters(c.model());
  Floats y(c.x.size());
  std::fill(c.b.begin(), c.b.end(), 0.0F);
  adapters.reload();
  adapters.forward({.tokens = raw_of(c.x, c.config.hidden),
                    .base = raw_of(c.base, c.config.hidden),
                    .out = raw_of(y, c.config.hidden)});
  EXPECT_EQ(y, c.base);
  EXPECT_EQ(adapters.stats().counts.size(), 4U);
}

TEST(Perft, LossesOfTheirRouterReachItsGateAlone) {
  PerftCase c = some_cases()[0];
  std::fill(c.dy.begin(), c.dy.end(), 0.0F);
  c.losses.balance = 0.1;
  const PerftResults r = run_perft(c);
  EXPECT_TRUE(std::any_of(r.dgate.begin(), r.dgate.end(), [](float v) { return v != 0; }));
  EXPECT_TRUE(std::all_of(r.da.begin(), r.da.end(), [](float v) { return v == 0; }));
}

TEST(Perft, RefusesByNameWhatDoesNotFit) {
  const auto refuse = [](std::size_t number, const std::string& words, const auto& spoil,
                         ErrorCode code = ErrorCode::kInvalidArgument) {
    PerftCase c = some_cases()[number];
    spoil(c);
    expect_error(code, words, [&] {
      check(c.config);
      run_perft(c);
    });
  };
  refuse(0, "rank=0", [](auto& c) { c.config.rank = 0; });
  refuse(0, "alpha=inf", [](auto& c) { c.config.alpha = HUGE_VALF; });
  refuse(0, "num_adapters=4 of kind routed, but the router has num_experts=3",
         [](auto& c) { c.config.router.num_experts = 3; });
  refuse(0, "want a rule by logits", [](auto& c) { c.config.router.kind = HashRouter{}; });
  refuse(0, "a chain with adapters of kind routed",
         [](auto& c) { c.config.router.chain.iterations = 2; });
  refuse(0, "clamped_swiglu has a gate",
         [](auto& c) { c.config.activation = Activation::kClampedSwiglu; });
  refuse(3, "dense adapters take no gate", [](auto& c) { c.gate = c.a; });
  refuse(4, "num_adapters=2 of kind shared", [](auto& c) { c.config.num_adapters = 2; });
  const PerftCase c = some_cases()[0];
  expect_error(ErrorCode::kInvalidArgument, "max_tokens=-1 is negative",
               [&] { PerftAdapters(c.model(), {.max_tokens = -1}); });
  PerftAdapters adapters(c.model());
  SavedForward saved;
  Floats y(c.x.size()), dweight(14);
  PerftForwardArgs forward{.tokens = raw_of(c.x, 10), .out = raw_of(y, 10), .saved = &saved};
  forward.base = raw_of(c.base, 5);
  expect_error(ErrorCode::kInvalidArgument, "base is [14, 5], want [7, 10]",
               [&] { adapters.forward(forward); });
  forward.base = {};
  forward.weight = {dweight.data(), {7, 2}};
  expect_error(ErrorCode::kInvalidArgument, "a routing is given to adapters of kind routed",
               [&] { adapters.forward(forward); });
  forward.weight = {};
  adapters.forward(forward);
  PerftBackwardArgs back{.saved = &saved, .dout = raw_of(c.dy, 10)};
  back.dweight = {dweight.data(), {7, 2}};
  expect_error(ErrorCode::kInvalidArgument, "dweight of adapters of kind routed",
               [&] { adapters.backward(back); });
  back.dweight = {};
  back.da = raw_of(y, 10);
  expect_error(ErrorCode::kInvalidArgument, "da is [7, 10], want [16, 10]",
               [&] { adapters.backward(back); });
  back.da = {};
  adapters.backward(back);
  expect_error(ErrorCode::kInvalidArgument, "used", [&] { adapters.backward(back); });
}

}  // namespace
}  // namespace switchyard::test
