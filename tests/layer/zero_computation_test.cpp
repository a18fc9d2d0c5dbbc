// Zero-computation experts and gating residuals of MoE++: numpy's numbers
// (tests/data/moe_plus_plus_golden.py), ranks, and what a layer says of what cannot be. Random
// layers are `verify`'s; copies alone tests/layer/weight_places_test.cpp's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/layer.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/rank_harness.hpp"

namespace switchyard {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using nlohmann::json;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

const json& golden() {
  static const json document = [] {
    std::ifstream file(SWITCHYARD_TEST_DATA "/moe_plus_plus_golden.json");
    return json::parse(file);
  }();
  return document;
}

RawMatrix raw_rows(Floats& values, std::int64_t cols, std::int64_t first, std::int64_t count) {
  return {reinterpret_cast<std::byte*>(values.data() + first * cols), DType::kF32, count, cols};
}

/// A case of the file: its layers one after the other, and all gradients.
class GoldenLayers {
 public:
  explicit GoldenLayers(const json& entry)
      : entry_(entry),
        layers_(entry.at("layers")),
        tokens_(entry.at("tokens")),
        hidden_(entry.at("hidden")),
        inner_(entry.at("inner")),
        experts_(entry.at("experts")),
        w13_(given("w13")),
        w2_(given("w2")) {
    router_ =
        parse_router("moe++:zero=" + std::to_string(entry.at("zero").get<int>()) +
                         ",copy=" + std::to_string(entry.at("copy").get<int>()) +
                         ",constant=" + std::to_string(entry.at("constant").get<int>()) +
                         ",tau=" + std::to_string(entry.at("tau").get<double>()) +
                         ",renormalize=" + (entry.at("renormalize").get<bool>() ? "yes" : "no"),
                     {.num_experts = experts_, .kind = TopKRouter{.top_k = entry.at("top_k")}});
  }

  [[nodiscard]] std::int32_t all() const { return router_.num_experts; }
  [[nodiscard]] Floats given(const char* name) const {
    return entry_.at("given").value(name, Floats{});
  }

  struct Results {
    Floats y, dx, dgate, dconstants, dw13, dw2, dresidual;
    std::vector<Floats> logits;
    std::vector<std::vector<std::int32_t>> expert;
    std::vector<std::vector<std::uint8_t>> kept;
    Doubles balances;
  };

  /// Forward and back, of the tokens [first, first + count); the layers' experts' gradients are
  /// those of this rank.
  Results run(std::int64_t first, std::int64_t count, Communicator* ranks = nullptr,
              int threads = 1) const {
    Results r;
    Floats x = given("x");
    Floats dy = entry_.at("dy").get<Floats>();
    const LayerOptions options = options_for(threads);
    std::vector<std::unique_ptr<MoeLayer>> layers;
    std::vector<SavedForward> saved(at(layers_));
    std::vector<Floats> between{x};
    r.logits.assign(at(layers_), Floats(at(tokens_ * all())));
    for (std::int64_t i = 0; i < layers_; ++i) {
      layers.push_back(std::make_unique<MoeLayer>(model(i), options, ranks));
      between.emplace_back(x.size());
      RoutingRecord record;
      ForwardArgs args{.tokens = raw_rows(between[at(i)], hidden_, first, count),
                       .out = raw_rows(between[at(i + 1)], hidden_, first, count),
                       .saved = &saved[at(i)]};
      args.request.record = &record;
      args.request.logits = {r.logits[at(i)].data() + first * all(), {count, all()}};
      if (i > 0) {
        args.request.previous_logits = {r.logits[at(i - 1)].data() + first * all(), {count, all()}};
      }
      layers.back()->forward(args);
      r.expert.push_back(record.expert);
      r.kept.push_back(record.kept);
      if (options.losses.any()) r.balances.push_back(saved[at(i)].losses()[0]);
    }
    r.y = between.back();
    const std::int64_t held = layers[0]->weights().num_local();
    r.dgate.resize(at(layers_ * all() * hidden_));
    r.dconstants.resize(at(layers_ * 3 * router_.zero_computation.constant * hidden_));
    r.dw13.resize(at(layers_ * held * 2 * inner_ * hidden_));
    r.dw2.resize(at(layers_ * held * hidden_ * inner_));
    r.dresidual.resize(at(layers_ > 1 ? all() * all() : 0));
    Floats dlogits;
    for (std::int64_t i = layers_; i-- > 0;) {
      Floats dtokens(x.size());
      Floats dprevious(at(count * all()));
      const std::int64_t w13 = held * 2 * inner_, w2 = held * hidden_;
      const std::int64_t constants = std::ssize(r.dconstants) / layers_;
      BackwardArgs args{.saved = &saved[at(i)],
                        .dout = raw_rows(dy, hidden_, first, count),
                        .dtokens = raw_rows(dtokens, hidden_, first, count),
                        .dgate = raw_rows(r.dgate, hidden_, i * all(), all()),
                        .dconstant_experts = {r.dconstants.data() + i * constants, {constants}},
                        .experts = {.w13 = raw_rows(r.dw13, hidden_, i * w13, w13),
                                    .w2 = raw_rows(r.dw2, inner_, i * w2, w2)}};
      if (constants == 0) args.dconstant_experts = {};
      if (!dlogits.empty()) args.dlogits = {dlogits.data(), {count, all()}};
      if (i > 0) {
        args.dgating_residual = {r.dresidual.data(), {std::ssize(r.dresidual)}};
        args.dprevious_logits = {dprevious.data(), {count, all()}};
      }
      layers[at(i)]->backward(args);
      dlogits = dprevious;
      dy = dtokens;
    }
    r.dx = dy;
    return r;
  }

  void expect_golden(const Results& r) const {
    const json& gradients = entry_.at("gradients");
    expect_near(r.y, entry_.at("y"), "y");
    expect_near(r.dx, gradients.at("x"), "dx");
    expect_near(r.dgate, gradients.at("gate"), "dgate");
    expect_near(r.dconstants, gradients.at("constants"), "dconstants");
    expect_near(r.dw13, gradients.at("w13"), "dw13");
    expect_near(r.dw2, gradients.at("w2"), "dw2");
    expect_near(r.dresidual, gradients.value("residual", Doubles{}), "dresidual");
    for (std::size_t i = 0; i < r.logits.size(); ++i) {
      expect_near(r.logits[i], entry_.at("logits")[i], "logits");
      EXPECT_EQ(r.expert[i], entry_.at("expert")[i].get<std::vector<std::int32_t>>());
      EXPECT_EQ(r.kept[i], entry_.at("kept")[i].get<std::vector<std::uint8_t>>());
    }
    for (std::size_t i = 0; i < r.balances.size(); ++i) {
      EXPECT_NEAR(r.balances[i], entry_.at("balances")[i].get<double>(), 1e-6);
    }
  }

 private:
  [[nodiscard]] LayerModel model(std::int64_t i) const {
    LayerModel model;
    model.config.router = router_;
    model.config.router.gating_residual = i > 0;
    model.config.experts = {.num_experts = experts_, .hidden = hidden_, .inner = inner_};
    model.experts = make_memory_source(model.config.experts, DType::kF32,
                                       w13_.data() + from(w13_, i), w2_.data() + from(w2_, i));
    model.gate = part("gate", i);
    model.constant_experts = part("constants", i);
    if (i > 0) model.gating_residual = given("residual");
    return model;
  }

  /// Where a layer's part of an array of all layers begins.
  [[nodiscard]] std::int64_t from(const Floats& whole, std::int64_t layer) const {
    return std::ssize(whole) / layers_ * layer;
  }
  [[nodiscard]] Floats part(const char* name, std::int64_t layer) const {
    const Floats whole = given(name);
    return {whole.begin() + from(whole, layer), whole.begin() + from(whole, layer + 1)};
  }

  [[nodiscard]] LayerOptions options_for(int threads) const {
    LayerOptions options{.max_tokens = tokens_, .num_threads = threads};
    options.losses.balance = entry_.at("balance");
    if (entry_.at("capacity") > 0) options.capacity_factor = entry_.at("capacity").get<double>();
    return options;
  }

  static void expect_near(const Floats& have, const Doubles& want, const char* name) {
    ASSERT_EQ(have.size(), want.size()) << name;
    for (std::size_t i = 0; i < have.size(); ++i) {
      ASSERT_NEAR(double{have[i]}, want[i], 3e-6 * (1 + std::abs(want[i]))) << name << " " << i;
    }
  }

  const json& entry_;
  std::int64_t layers_, tokens_, hidden_, inner_;
  std::int32_t experts_;
  RouterConfig router_;
  Floats w13_, w2_;  ///< Of all layers, which read them as long as they are made.
};

TEST(ZeroComputation, LayersThereAndBackAreNumpys) {
  ASSERT_EQ(golden().size(), 4U);
  for (const auto& [name, entry] : golden().items()) {
    SCOPED_TRACE(name);
    const GoldenLayers layers(entry);
    const auto result = layers.run(0, entry.at("tokens"));
    layers.expect_golden(result);
    const auto again = layers.run(0, entry.at("tokens"), nullptr, 3);
    EXPECT_EQ(again.dconstants, result.dconstants) << "other bits with three threads";
    EXPECT_EQ(again.dresidual, result.dresidual);
  }
}

TEST(ZeroComputation, OverRanksAllHaveTheGradientsOfOne) {
  for (const char* name : {"all kinds", "two layers"}) {
    SCOPED_TRACE(name);
    json entry = golden().at(name);
    entry["balance"] = 0;  // of a rank's own tokens
    const GoldenLayers layers(entry);
    const std::int64_t tokens = entry.at("tokens");
    const auto want = layers.run(0, tokens);
    for (const int num_ranks : {2, 3, 8}) {
      on_ranks(num_ranks, [&](Communicator& communicator) {
        const std::int64_t first = communicator.rank() * tokens / num_ranks;
        const std::int64_t end = (communicator.rank() + 1) * tokens / num_ranks;
        const auto mine = layers.run(first, end - first, &communicator);
        const std::int64_t hidden = entry.at("hidden");
        for (std::int64_t i = first * hidden; i < end * hidden; ++i) {
          ASSERT_NEAR(mine.y[at(i)], want.y[at(i)], 1e-5) << i;
          ASSERT_NEAR(mine.dx[at(i)], want.dx[at(i)], 1e-5) << i;
        }
        for (std::size_t i = 0; i < want.dconstants.size(); ++i) {
          ASSERT_NEAR(mine.dconstants[i], want.dconstants[i], 1e-5) << i;
        }
        for (std::size_t i = 0; i < want.dresidual.size(); ++i) {
          ASSERT_NEAR(mine.dresidual[i], want.dresidual[i], 1e-5) << i;
        }
      });
    }
  }
}

/// Two experts of width 4 for 8 numbers, and a router that spells what is beside them.
struct Small {
  explicit Small(const std::string& spelling = "moe++") {
    model.config.experts = {.num_experts = 2, .hidden = 8, .inner = 4};
    model.experts = make_memory_source(model.config.experts, DType::kF32, w13.data(), w2.data());
    model.config.router = {.num_experts = 2, .kind = TopKRouter{.top_k = 2}};
    model.gate = Floats(16, 0.5F);
    use_router(model, parse_router(spelling, model.config.router));
  }
  Floats w13 = Floats(2 * 8 * 8, 0.25F);
  Floats w2 = Floats(2 * 8 * 4, 0.5F);
  LayerModel model;
};

TEST(ZeroComputation, AnotherRouterBeginsWithoutThem) {
  const Small small("moe++:constant=2,copy=1,zero=1,residual=yes");
  EXPECT_EQ(small.model.config.router.num_experts, 6);
  Floats gate(6 * 8);
  std::fill_n(gate.begin(), 16, 0.5F);
  EXPECT_EQ(small.model.gate.widened(), gate);
  EXPECT_EQ(small.model.constant_experts.widened(), Floats(2 * 3 * 8));
  EXPECT_EQ(small.model.gating_residual.widened(), Floats(36));
  LayerModel other = small.model;
  use_router(other, parse_router("moe++:constant=0,copy=4,zero=0", other.config.router));
  EXPECT_EQ(other.gate.widened(), gate);
  EXPECT_TRUE(other.constant_experts.empty());
  EXPECT_EQ(other.config.experts.num_experts, other.config.router.num_computing());
}

TEST(ZeroComputation, SlotsFollowTau) {
  const RouterConfig base{.num_experts = 4, .kind = TopKRouter{.top_k = 2}};
  const auto slots = [&](const char* spelling, double factor, std::int64_t tokens) {
    const RouterCapacity found = capacity_for(parse_router(spelling, base), factor, tokens);
    return std::pair(found.computing, found.zero_computation);
  };
  // 1.1 * 64 * 2 / (0.75 * 4 + 4) = 20.1, and 0.75 times that 15.1.
  EXPECT_EQ(slots("moe++", 1.1, 64), (std::pair<std::int64_t, std::int64_t>(16, 21)));
  // LongCat-Flash's: of 8 alike, and any number.
  EXPECT_EQ(slots("moe++:tau=0", 1.0, 64), (std::pair<std::int64_t, std::int64_t>(16, 0)));
  EXPECT_EQ(slots("moe++:tau=1", 1.0, 64), (std::pair<std::int64_t, std::int64_t>(16, 16)));
  EXPECT_EQ(slots("moe++:tau=0.001", 0.01, 3), (std::pair<std::int64_t, std::int64_t>(1, 1)));
  EXPECT_EQ(slots("moe++", 1.0, 0), (std::pair<std::int64_t, std::int64_t>(0, 0)));
}

TEST(ZeroComputation, TheirPicksNeverTravel) {
  Small small;
  on_ranks(2, [&](Communicator& communicator) {
    MoeLayer layer(small.model, {.max_tokens = 4}, &communicator);
    Floats x(4 * 8, 1.0F);
    Floats y(x.size());
    const std::vector<std::int32_t> expert{2, 3, 4, 5, 5, 2, 4, 4};
    const Floats weight(8, 0.5F);
    RoutingRecord record;
    ForwardArgs args{.tokens = raw_rows(x, 8, 0, 4),
                     .out = raw_rows(y, 8, 0, 4),
                     .expert = {expert.data(), {4, 2}},
                     .weight = {weight.data(), {4, 2}}};
    args.request.record = &record;
    layer.forward(args);
    EXPECT_EQ(layer.traffic().rows, std::vector<std::int64_t>(4));
    EXPECT_EQ(layer.rows_executed(), 0);
    EXPECT_EQ(record.counts, (std::vector<std::int64_t>{0, 0, 2, 1, 3, 2}));
    // W and v are zeros: a constant expert gives half of the token; then copy, and zero.
    const Floats want{0.5F, 0.5F, 0.25F, 1.0F};
    for (std::int64_t i = 0; i < 32; ++i) EXPECT_EQ(y[at(i)], want[at(i / 8)]) << i;
  });
}

void refuse(ErrorCode code, const char* words, const auto& call) {
  test::expect_error(code, words, call);
}

TEST(ZeroComputation, SpellingsThatCannotBeSayWhy) {
  const RouterConfig base{.num_experts = 2, .kind = TopKRouter{.top_k = 2}};
  const auto bad = [&](const char* spelling, const char* words) {
    refuse(ErrorCode::kInvalidArgument, words, [&] { (void)parse_router(spelling, base); });
  };
  bad("moe++:zero=0,copy=0,constant=0", "zero=0, copy=0 and constant=0: want at least one");
  bad("moe++:tau=1.5", "tau");
  bad("moe++:top-k=7", "top_k=7 exceeds num_experts=6");
  bad("moe++:null-experts=2", "null-experts");
  RouterConfig config = parse_router("moe++", base);
  config.zero_computation.copy = 9;
  refuse(ErrorCode::kInvalidArgument, "copy=9 zero-computation experts", [&] { check(config); });
  config.zero_computation = {.constant = 3, .copy = 3};
  refuse(ErrorCode::kInvalidArgument, "none is left that computes", [&] { check(config); });
  config.zero_computation = {.tau = 0.5F};
  refuse(ErrorCode::kInvalidArgument, "tau=0.5 without zero-computation experts",
         [&] { check(config); });
  config = {.num_experts = 4, .kind = HashRouter{.top_k = 1}, .gating_residual = true};
  refuse(ErrorCode::kInvalidArgument, "a gating residual with the router hash",
         [&] { check(config); });
}

TEST(ZeroComputation, CallsThatCannotBeSayWhy) {
  const Small plain;
  const Small residual("moe++:residual=yes");
  Floats x(3 * 8);
  Floats y(x.size());
  Floats before(3 * 6);
  const ForwardArgs args{.tokens = raw_rows(x, 8, 0, 3), .out = raw_rows(y, 8, 0, 3)};
  MoeLayer layer(residual.model, {});
  refuse(ErrorCode::kInvalidArgument,
         "request.previous_logits are missing: the router has a gating",
         [&] { layer.forward(args); });
  ForwardArgs with = args;
  with.request.previous_logits = {before.data(), {3, 5}};
  refuse(ErrorCode::kInvalidArgument, "request.previous_logits", [&] { layer.forward(with); });
  with.request.previous_logits = {before.data(), {3, 6}};
  layer.forward(with);
  MoeLayer without(plain.model, {});
  refuse(ErrorCode::kInvalidArgument, "previous_logits are given, but the router has no gating",
         [&] { without.forward(with); });
  with.request.previous_logits = {};
  with.request.logits = {before.data(), {2, 6}};
  refuse(ErrorCode::kInvalidArgument, "request.logits", [&] { without.forward(with); });

  SavedForward saved;
  ForwardArgs keeps = args;
  keeps.saved = &saved;
  without.forward(keeps);
  Floats many(36);
  refuse(ErrorCode::kInvalidArgument, "but the router has no gating residual", [&] {
    without.backward({.saved = &saved, .dout = args.out, .dgating_residual = {many.data(), {36}}});
  });
  refuse(ErrorCode::kInvalidArgument, "dconstant_experts", [&] {
    without.backward({.saved = &saved, .dout = args.out, .dconstant_experts = {many.data(), {36}}});
  });

  LayerModel wrong = plain.model;
  wrong.constant_experts = Floats(47);
  refuse(ErrorCode::kInvalidArgument, "constant_experts has 47 values, want 48",
         [&] { MoeLayer bad(wrong, {}); });
  wrong = residual.model;
  wrong.gating_residual = {};
  refuse(ErrorCode::kInvalidArgument, "gating_residual has 0 values, want 36",
         [&] { MoeLayer bad(wrong, {}); });
  refuse(ErrorCode::kUnsupported, "zero-computation experts of tau=0.75", [&] {
    MoeLayer bad(plain.model, {.backend = Backend::kCuda, .losses = {.balance = 0.5}});
  });
  refuse(ErrorCode::kUnsupported, "4 zero-computation experts with drop_policy=reroute", [&] {
    MoeLayer bad(plain.model, {.capacity_factor = 1.0, .drop_policy = DropPolicy::kReroute});
  });
}

}  // namespace
}  // namespace switchyard
