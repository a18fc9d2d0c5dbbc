// What a layer's way back promises beside its numbers, which `switchyard verify --pass` checks
// (tests/reference/verify_backward_test.cpp): what is kept and for how long, and bad input.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"
#include "verify/problem.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using verify::Case;
using verify::Problem;

constexpr std::int64_t kHidden = 11;
constexpr std::int64_t kInner = 6;
constexpr std::int32_t kExperts = 5;
constexpr std::int32_t kTopK = 2;

Problem make_layer(bool shared = true, std::uint64_t seed = 5) {
  Case test;
  test.seed = seed;
  test.layer.router = {.num_experts = kExperts, .kind = TopKRouter{.top_k = kTopK}};
  test.layer.experts = {
      .num_experts = kExperts, .hidden = kHidden, .inner = kInner, .bias = shared};
  if (shared) {
    test.layer.shared = test.layer.experts;
    test.layer.shared.num_experts = 1;
    test.layer.shared.inner = 4;
    test.layer.shared_gated = true;
  }
  return make_problem(test);
}

/// Tokens with what comes back for them: dtokens, dw13 and dgate, one after the other.
struct Step {
  std::int64_t num_tokens;
  std::vector<float> tokens, dout, out;
  Step(std::int64_t count, unsigned seed)
      : num_tokens(count),
        tokens(random_floats(count * kHidden, seed)),
        dout(random_floats(count * kHidden, seed + 1)),
        out(tokens.size()) {}

  [[nodiscard]] RawMatrix matrix(std::vector<float>& values) const {
    return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, num_tokens, kHidden};
  }

  void forward(MoeLayer& layer, SavedForward* saved, bool stays = false) {
    layer.forward(
        {.tokens = matrix(tokens), .out = matrix(out), .saved = saved, .tokens_stay = stays});
  }

  std::vector<float> backward(MoeLayer& layer, SavedForward& saved) {
    std::vector<float> dtokens(tokens.size());
    std::vector<float> w13(kExperts * 2 * kInner * kHidden);
    std::vector<float> gate(kExperts * kHidden);
    layer.backward(
        {.saved = &saved,
         .dout = matrix(dout),
         .dtokens = matrix(dtokens),
         .dgate = {reinterpret_cast<std::byte*>(gate.data()), DType::kF32, kExperts, kHidden},
         .experts = {.w13 = {reinterpret_cast<std::byte*>(w13.data()), DType::kF32,
                             kExperts * 2 * kInner, kHidden}}});
    dtokens.insert(dtokens.end(), w13.begin(), w13.end());
    dtokens.insert(dtokens.end(), gate.begin(), gate.end());
    return dtokens;
  }

  std::vector<float> both(MoeLayer& layer, SavedForward& saved) {
    forward(layer, &saved);
    return backward(layer, saved);
  }
};

TEST(LayerBackward, TwoForwardsInFlightGoBackInAnyOrderAndMemoryIsUsedAgain) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kActivationInput}) {
    const Problem problem = make_layer();
    MoeLayer layer(problem.model, {});
    Step large(40, 1);
    Step small(7, 3);
    SavedForward fresh(recompute);
    const std::vector<float> of_large = large.both(layer, fresh);
    SavedForward other(recompute);
    const std::vector<float> of_small = small.both(layer, other);
    SavedForward first(recompute);
    SavedForward second(recompute);
    for (int step = 0; step < 3; ++step) {
      large.forward(layer, &first);
      small.forward(layer, &second);
      large.forward(layer, nullptr);
      EXPECT_EQ(large.backward(layer, first), of_large);
      EXPECT_EQ(small.backward(layer, second), of_small);
      std::swap(first, second);  // the smaller call next in the larger one's memory
    }
  }
}

TEST(LayerBackward, TheCallersTokensMayChangeBetweenForwardAndBackward) {
  const Problem problem = make_layer();
  MoeLayer layer(problem.model, {});
  Step step(9, 1);
  SavedForward saved;
  const std::vector<float> want = step.both(layer, saved);
  step.forward(layer, &saved);
  std::fill(step.tokens.begin(), step.tokens.end(), std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(step.backward(layer, saved), want);
}

TEST(LayerBackward, TokensThatStayAreNotCopiedAndGiveTheSameBits) {
  Problem problem = make_layer();
  MoeLayer layer(problem.model, {});
  Step step(9, 3);
  SavedForward copied, stays;
  step.forward(layer, &copied);
  const auto want = step.backward(layer, copied);
  step.forward(layer, &stays, true);
  EXPECT_EQ(step.backward(layer, stays), want);
  EXPECT_EQ(copied.bytes() - stays.bytes(), 4 * 9 * kHidden);
}

TEST(LayerBackward, AScratchIsForGpus) {
  Problem problem = make_layer();
  struct Some final : LayerScratch {};
  expect_error(ErrorCode::kUnsupported, "a layer on a CPU takes no scratch",
               [&] { const MoeLayer layer(problem.model, {.scratch = std::make_shared<Some>()}); });
}

TEST(LayerBackward, WhatIsKeptHasTheBytesOfTheFormula) {
  const Problem problem = make_layer();
  constexpr std::int64_t kTokens = 13;
  constexpr std::int64_t kRows = kTokens * kTopK;
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const bool capacity : {false, true}) {
      LayerOptions options{.compute = compute};
      if (capacity) options.capacity_factor = 100.0;
      MoeLayer layer(problem.model, options);
      Step step(kTokens, 2);
      const std::int64_t c = size_of(compute);
      const std::int64_t routing = (capacity ? 9 : 8) * kRows;
      const std::int64_t always = c * kTokens * kHidden + 4 * kTokens * kExperts + routing;
      SavedForward few(Recompute::kActivationInput);
      step.forward(layer, &few);
      EXPECT_EQ(few.bytes(), always);
      SavedForward all;
      step.forward(layer, &all);
      EXPECT_EQ(all.bytes(), always + c * kRows * 2 * kInner + c * kTokens * 2 * 4);
    }
  }
}

TEST(LayerBackward, ASavedForwardIsUsedOnceAndByItsOwnLayer) {
  const Problem problem = make_layer();
  MoeLayer layer(problem.model, {});
  MoeLayer twin(problem.model, {});
  Step step(6, 1);
  SavedForward saved;
  const auto refused = [&](MoeLayer& by, const char* words) {
    expect_error(ErrorCode::kInvalidArgument, words, [&] { (void)step.backward(by, saved); });
  };
  EXPECT_FALSE(saved.ready());
  refused(layer, "no forward has filled this saved forward");
  step.forward(layer, &saved);
  EXPECT_TRUE(saved.ready());
  refused(twin, "another layer's");
  EXPECT_TRUE(saved.ready());
  (void)step.backward(layer, saved);
  EXPECT_FALSE(saved.ready());
  refused(layer, "a backward has used this saved forward already");
  step.forward(layer, &saved);
  layer.reload_experts();
  refused(layer, "the experts were reloaded after this saved forward");
  expect_error(ErrorCode::kInvalidArgument, "backward has no saved forward",
               [&] { layer.backward({.dout = step.matrix(step.dout)}); });
  (void)step.both(layer, saved);
}

TEST(LayerBackward, AForwardThatFailsLeavesNothingToGoBackThrough) {
  const Problem problem = make_layer();
  MoeLayer layer(problem.model, {});
  Step step(6, 1);
  SavedForward saved;
  step.forward(layer, &saved);
  step.tokens[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(step.forward(layer, &saved), Error);
  EXPECT_FALSE(saved.ready());
  expect_error(ErrorCode::kInvalidArgument, "no forward has filled this saved forward",
               [&] { (void)step.backward(layer, saved); });
}

TEST(LayerBackward, GradientsOfAnotherShapeOrTypeAreRefusedByNameAndNothingIsUsedUp) {
  const Problem problem = make_layer();
  const Problem plain = make_layer(false);
  MoeLayer layer(problem.model, {});
  Step step(6, 1);
  SavedForward saved;
  step.forward(layer, &saved);
  std::vector<float> room(4096);
  auto* const bytes = reinterpret_cast<std::byte*>(room.data());
  const auto refused = [&](const char* words, BackwardArgs args) {
    args.saved = &saved;
    if (args.dout.data == nullptr) args.dout = step.matrix(step.dout);
    expect_error(ErrorCode::kInvalidArgument, words, [&] { layer.backward(args); });
    EXPECT_TRUE(saved.ready()) << words;
  };
  constexpr DType kF32 = DType::kF32;
  refused("dout", {.dout = {bytes, kF32, 5, kHidden}});
  refused("dout", {.dout = {bytes, DType::kF8E4M3, 6, kHidden}});
  refused("dtokens", {.dtokens = {bytes, kF32, 6, kHidden + 1}});
  refused("dweight", {.dweight = {room.data(), {6, kTopK + 1}}});
  refused("dgate", {.dgate = {bytes, kF32, kExperts + 1, kHidden}});
  refused("drouter_bias", {.drouter_bias = {room.data(), {kExperts - 1}}});
  refused("dlogits", {.dlogits = {room.data(), {5, kExperts}}});
  refused("dw13", {.experts = {.w13 = {bytes, kF32, kExperts * kInner, kHidden}}});
  refused("dw2 is bf16", {.experts = {.w2 = {bytes, DType::kBF16, kExperts * kHidden, kInner}}});
  refused("db13", {.experts = {.b13 = {room.data(), {kExperts, kInner}}}});
  refused("shared dw2", {.shared = {.w2 = {bytes, kF32, kHidden, kInner + 1}}});
  refused("shared db2", {.shared = {.b2 = {room.data(), {2, kHidden}}}});
  refused("dshared_gate", {.dshared_gate = {room.data(), {kHidden - 1}}});
  (void)step.backward(layer, saved);

  MoeLayer few(plain.model, {});
  const auto has_none = [&](const char* words, BackwardArgs args) {
    step.forward(few, &saved);
    args.saved = &saved;
    args.dout = step.matrix(step.dout);
    expect_error(ErrorCode::kInvalidArgument, words, [&] { few.backward(args); });
  };
  has_none("db13 is asked for, but the experts have no biases",
           {.experts = {.b13 = {room.data(), {kExperts, 2 * kInner}}}});
  has_none("of shared experts are asked for", {.shared = {.w2 = {bytes, kF32, kHidden, 4}}});
  has_none("dshared_gate is asked for", {.dshared_gate = {room.data(), {kHidden}}});
}

TEST(LayerBackward, WhereTheRoutingWasGivenTheRoutersGradientsAreRefused) {
  const Problem problem = make_layer();
  MoeLayer layer(problem.model, {});
  Step step(3, 1);
  SavedForward saved;
  const std::vector<std::int32_t> expert{0, 1, -1, 3, 4, 4};
  const std::vector<float> weight{0.5F, 0.25F, 1, 2, -1, 3};
  layer.forward({.tokens = step.matrix(step.tokens),
                 .out = step.matrix(step.out),
                 .expert = {expert.data(), {3, kTopK}},
                 .weight = {weight.data(), {3, kTopK}},
                 .saved = &saved});
  expect_error(ErrorCode::kInvalidArgument, "the routing was given",
               [&] { (void)step.backward(layer, saved); });
  EXPECT_TRUE(saved.ready());
}

TEST(LayerBackward, WhatHasNoWayBackSaysSoWhenItIsToBeKept) {
  const Problem problem = make_layer();
  MoeLayer layer(problem.model, {.weights = WeightFormat::kQ8});
  expect_error(ErrorCode::kUnsupported, "those of these experts are stored as f32",
               [&] { MoeLayer(problem.model, {.weights = WeightFormat::kStored}); });
  Step step(3, 1);
  SavedForward saved;
  expect_error(ErrorCode::kInvalidArgument, "a backward wants exact weights, not q8",
               [&] { step.forward(layer, &saved); });
  EXPECT_FALSE(saved.ready());
}

TEST(LayerBackward, ANaNInDoutReachesItsTokenAndNoOther) {
  const Problem problem = make_layer();
  MoeLayer layer(problem.model, {});
  Step step(8, 1);
  SavedForward saved;
  const std::vector<float> good = step.both(layer, saved);
  step.dout[3 * kHidden + 2] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> bad = step.both(layer, saved);
  for (std::size_t i = 0; i < step.tokens.size(); ++i) {
    if (i / kHidden == 3) {
      EXPECT_TRUE(std::isnan(bad[i])) << i;
    } else {
      EXPECT_EQ(bad[i], good[i]) << i;
    }
  }
}

TEST(LayerBackward, ALayerThatReloadsChangedWeightsGoesOnAsOneThatIsMadeOfThem) {
  const Problem problem = make_layer();
  const Problem changed = make_layer(true, 6);
  const auto source = std::dynamic_pointer_cast<const verify::PlainSource>(problem.model.experts);
  const auto target = std::dynamic_pointer_cast<const verify::PlainSource>(changed.model.experts);
  ASSERT_NE(source, nullptr);
  LayerModel mixed = problem.model;
  mixed.experts = changed.model.experts;
  MoeLayer layer(problem.model, {});
  Step step(20, 1);
  SavedForward saved;
  const std::vector<float> before = step.both(layer, saved);
  MoeLayer fresh(mixed, {});
  const std::vector<float> want = step.both(fresh, saved);
  auto& weights = const_cast<verify::PlainSource&>(*source);  // as an optimiser does
  weights.gate = target->gate;
  weights.up = target->up;
  weights.down = target->down;
  weights.gate_bias = target->gate_bias;
  weights.up_bias = target->up_bias;
  weights.down_bias = target->down_bias;
  EXPECT_EQ(step.both(layer, saved), before);
  layer.reload_experts();
  EXPECT_EQ(step.both(layer, saved), want);
  EXPECT_NE(want, before);
}

/// Another source, which fails while it is told to: at the last matrix, when most is packed.
class FailingSource final : public ExpertSource {
 public:
  explicit FailingSource(std::shared_ptr<const ExpertSource> from) : from_(std::move(from)) {}
  [[nodiscard]] DType dtype() const override { return from_->dtype(); }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    if (fails && part == ExpertPart::kDown) throw Error(ErrorCode::kBadFile, "the source is gone");
    from_->read(expert, part, first_row, num_rows, dtype, out);
  }
  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    from_->read_bias(expert, part, out);
  }
  bool fails = false;

 private:
  std::shared_ptr<const ExpertSource> from_;
};

TEST(LayerBackward, WeightsThatCannotBeReloadedAreNone) {
  for (const bool of_shared : {false, true}) {
    SCOPED_TRACE(of_shared);
    Problem problem = make_layer();
    std::shared_ptr<const ExpertSource>& given =
        of_shared ? problem.model.shared : problem.model.experts;
    const auto source = std::make_shared<FailingSource>(given);
    given = source;
    MoeLayer layer(problem.model, {});
    Step step(20, 1);
    SavedForward saved;
    const std::vector<float> want = step.both(layer, saved);
    source->fails = true;
    for (int i = 0; i < 2; ++i) {
      expect_error(ErrorCode::kBadFile, "the source is gone", [&] { layer.reload_experts(); });
      expect_error(ErrorCode::kInvalidArgument, "the experts could not be reloaded",
                   [&] { step.forward(layer, nullptr); });
    }
    source->fails = false;
    layer.reload_experts();
    EXPECT_EQ(step.both(layer, saved), want);
  }
}

}  // namespace
}  // namespace switchyard
