// Back through the experts alone: against the reference in double, and by bits where they are
// promised, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "reference/backward.hpp"
#include "switchyard/backward.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/experts_support.hpp"

namespace switchyard::test {
namespace {

using reference::Bounded;
using Floats = std::vector<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::int64_t width_of(const ExpertConfig& config) { return (config.gated ? 2 : 1) * config.inner; }

/// dout [T, H] as the type has it.
Floats make_dout(const Problem& p) {
  Floats dout = random_floats(p.num_tokens * p.made.config.hidden, 77U);
  for (float& value : dout) value = round_to(p.made.dtype, value);
  return dout;
}

/// All gradients; those by row are in the order of the assignments.
struct Gradients {
  Floats weight, dx, w13, w2, b13, b2;
  bool operator==(const Gradients&) const = default;
};

/// How experts_backward() is called.
struct Way {
  Layout layout = kLayouts[0];
  bool keep = true;  ///< The pre-activation, else it is made again.
  bool accumulate = false;
  DType dx = DType::kF32;
  DType gradients = DType::kF32;  ///< Of the matrices.
  std::size_t offset = 0;         ///< Bytes from a cache line to where they begin.
  ThreadPool* pool = nullptr;
  /// Leaves arguments out.
  std::function<void(ExpertsBackwardArgs&)> change = [](ExpertsBackwardArgs&) {};
};

RawMatrix raw(Floats& values, std::int64_t cols) {
  return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, std::ssize(values) / cols,
          cols};
}

/// A matrix in memory as a call wants it, between bytes that nothing may touch.
class PlacedMatrix {
 public:
  PlacedMatrix(const Way& way, std::int64_t rows, std::int64_t cols, float start)
      : room_(at(rows * cols * size_of(way.gradients)) + 2 * kLine + way.offset, kUntouched) {
    const auto address = reinterpret_cast<std::uintptr_t>(room_.data());
    first_ = (kLine - address % kLine) % kLine + way.offset;
    const auto values = stored_as(way.gradients, Floats(at(rows * cols), start));
    std::copy(values.begin(), values.end(), room_.begin() + first());
    matrix_ = {room_.data() + first_, way.gradients, rows, cols};
  }
  [[nodiscard]] const RawMatrix& matrix() const { return matrix_; }
  [[nodiscard]] Floats values() const {
    const auto end = first() + matrix_.bytes();
    const auto touched = [](std::byte byte) { return byte != kUntouched; };
    EXPECT_TRUE(std::none_of(room_.begin(), room_.begin() + first(), touched));
    EXPECT_TRUE(std::none_of(room_.begin() + end, room_.end(), touched));
    return loaded_as_floats(matrix_.dtype, {room_.begin() + first(), room_.begin() + end});
  }

 private:
  static constexpr std::size_t kLine = 64;
  static constexpr std::byte kUntouched{0xa5};

  [[nodiscard]] std::int64_t first() const { return static_cast<std::int64_t>(first_); }

  std::vector<std::byte> room_;
  std::size_t first_;
  RawMatrix matrix_;
};

Gradients run_back(const Problem& p, const Way& way = {}) {
  const ExpertConfig& config = p.made.config;
  const std::int64_t width = width_of(config);
  const std::int64_t experts_count = config.num_experts;
  const auto weights = load(p, false, way.pool);
  TestPlan plan(p, way.layout);
  const StoredTokens x(p);
  const auto dout = stored_as(p.made.dtype, make_dout(p));
  const Execution execution{.pool = way.pool};
  std::vector<std::byte> z(at(plan.rows * width * size_of(p.made.dtype)), std::byte{0xff});
  const RawMatrix preactivation{z.data(), p.made.dtype, plan.rows, width};
  if (way.keep) {
    Floats rows(at(plan.rows * config.hidden));
    experts({.x = x.matrix,
             .plan = plan.view(),
             .layout = way.layout,
             .weights = weights.get(),
             .rows = raw(rows, config.hidden),
             .preactivation = preactivation,
             .execution = execution});
  }
  const float start = way.accumulate ? 0.75F : kNan;
  Gradients all{.weight = Floats(at(plan.rows), kNan),
                .dx = {},
                .w13 = {},
                .w2 = {},
                .b13 = Floats(config.bias ? at(experts_count * width) : 0, start),
                .b2 = Floats(config.bias ? at(experts_count * config.hidden) : 0, start)};
  const PlacedMatrix w13(way, experts_count * width, config.hidden, start);
  const PlacedMatrix w2(way, experts_count * config.hidden, config.inner, start);
  std::vector<std::byte> dx(at(plan.rows * config.hidden * size_of(way.dx)), std::byte{0xff});
  ExpertsBackwardArgs args{.x = x.matrix,
                           .dout = {dout.data(), p.made.dtype, p.num_tokens, config.hidden},
                           .plan = plan.view(),
                           .weights = weights.get(),
                           .drow_weight = {all.weight.data(), {plan.rows}},
                           .dx_rows = {dx.data(), way.dx, plan.rows, config.hidden},
                           .gradients = {.w13 = w13.matrix(), .w2 = w2.matrix()},
                           .accumulate = way.accumulate,
                           .execution = execution};
  if (way.keep) args.preactivation = preactivation;
  if (config.bias) {
    args.gradients.b13 = {all.b13.data(), {experts_count, width}};
    args.gradients.b2 = {all.b2.data(), {experts_count, config.hidden}};
  }
  way.change(args);
  experts_backward(args);
  all.w13 = w13.values();
  all.w2 = w2.values();
  all.dx = loaded_as_floats(way.dx, dx);
  Gradients used = all;
  used.weight.clear();
  used.dx.clear();
  for (const std::int64_t row : plan.row_of) {
    used.weight.push_back(all.weight[at(row)]);
    all.weight[at(row)] = kNan;
    const auto begin = all.dx.begin() + row * config.hidden;
    used.dx.insert(used.dx.end(), begin, begin + config.hidden);
    std::fill(begin, begin + config.hidden, kNan);
  }
  for (const float padding : all.weight) EXPECT_TRUE(std::isnan(padding));
  for (const float padding : all.dx) EXPECT_TRUE(std::isnan(padding));
  return used;
}

void expect_within(const char* name, const std::vector<Bounded>& want, const Floats& values,
                   double start = 0) {
  ASSERT_EQ(want.size(), values.size()) << name;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const Bounded sum = start == 0 ? want[i] : add(want[i], {start, 0});
    ASSERT_TRUE(reference::admits(sum, DType::kF32, double{values[i]}))
        << name << " " << i << " is " << values[i] << ", want " << sum.value << " +- " << sum.error;
  }
}

void expect_reference(const Problem& p, const Way& way = {}) {
  const ExpertConfig& config = p.made.config;
  const reference::Precision precision{.compute = p.made.dtype};
  const auto source = p.made.source();
  const Floats dout = make_dout(p);
  const auto row = [&](const Floats& values, std::int64_t token) {
    const auto begin = values.begin() + token * config.hidden;
    return std::vector<double>(begin, begin + config.hidden);
  };
  reference::ExpertGradient want;
  std::vector<Bounded> weight;
  std::vector<Bounded> dx;
  const auto append = [](std::vector<Bounded>& to, const std::vector<Bounded>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    const auto matrices = reference::read_expert(config, *source, e, precision);
    reference::ExpertBackward expert(config, matrices, precision);
    for (const Assignment& a : p.assignments) {
      if (a.expert != e) continue;
      const auto back = expert.add(row(p.x, a.token), row(dout, a.token), {double{a.weight}, 0});
      weight.push_back(back.weight);
      append(dx, back.dx);
    }
    const reference::ExpertGradient of_expert = expert.gradient();
    append(want.w13, of_expert.w13);
    append(want.w2, of_expert.w2);
    append(want.b13, of_expert.b13);
    append(want.b2, of_expert.b2);
  }
  const Gradients all = run_back(p, way);
  const double start = way.accumulate ? 0.75 : 0;
  expect_within("drow_weight", weight, all.weight);
  expect_within("dx", dx, all.dx);
  expect_within("dw13", want.w13, all.w13, start);
  expect_within("dw2", want.w2, all.w2, start);
  expect_within("db13", want.b13, all.b13, start);
  expect_within("db2", want.b2, all.b2, start);
}

constexpr Activation kActivations[] = {
    Activation::kSilu,  Activation::kGelu,          Activation::kGeluTanh, Activation::kRelu,
    Activation::kRelu2, Activation::kClampedSwiglu, Activation::kIdentity};

using ExpertsBackward = Experts;

TEST_P(ExpertsBackward, EveryActivationAgreesWithTheReferenceInDouble) {
  for (const Activation activation : kActivations) {
    for (const bool gated : {true, false}) {
      if (activation == Activation::kClampedSwiglu && !gated) continue;
      for (const DType dtype : kTypes) {
        SCOPED_TRACE(testing::Message()
                     << to_string(activation) << " gated " << gated << " " << to_string(dtype));
        expect_reference(make_problem({.num_experts = 3,
                                       .hidden = 65,
                                       .inner = 33,
                                       .gated = gated,
                                       .activation = activation,
                                       .limit = 1.0F,
                                       .bias = gated},
                                      dtype, 9, 2, 7),
                         {.keep = gated, .accumulate = !gated});
      }
    }
  }
}

TEST_P(ExpertsBackward, OddSizesAgreeWithTheReferenceInDouble) {
  for (const std::int64_t hidden : {1, 3, 64, 129}) {
    for (const std::int64_t inner : {1, 5, 16, 65}) {
      for (const DType dtype : kTypes) {
        SCOPED_TRACE(testing::Message()
                     << "H " << hidden << " I " << inner << " " << to_string(dtype));
        expect_reference(make_problem(
            {.num_experts = 2, .hidden = hidden, .inner = inner, .bias = true}, dtype, 5, 2, 11));
      }
    }
  }
}

TEST_P(ExpertsBackward, AnyNumberOfRowsOfOneExpertAgreesWithTheReferenceInDouble) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t tokens : {1, 2, 3, 7, 14, 15, 17, 33, 100}) {
      SCOPED_TRACE(testing::Message() << tokens << " " << to_string(dtype));
      expect_reference(
          make_problem({.num_experts = 1, .hidden = 40, .inner = 24}, dtype, tokens, 1, 3));
    }
  }
}

TEST_P(ExpertsBackward, DeepSumsAgreeWithTheReferenceInDouble) {
  for (const DType dtype : kTypes) {
    expect_reference(make_problem({.num_experts = 1, .hidden = 900, .inner = 20}, dtype, 12, 1, 5));
    expect_reference(make_problem({.num_experts = 1, .hidden = 20, .inner = 700}, dtype, 12, 1, 5));
    expect_reference(make_problem({.num_experts = 1, .hidden = 9, .inner = 8}, dtype, 1100, 1, 5));
    // More rows than are taken through the products at once, and several panels of each matrix.
    expect_reference(
        make_problem({.num_experts = 2, .hidden = 99, .inner = 72}, dtype, 611, 1, 41));
  }
}

/// Their gradients go past the caches, but for what does not begin or end with 16 bytes.
TEST_P(ExpertsBackward, LargeMatricesAgreeWithTheReferenceInDouble) {
  const Problem p =
      make_problem({.num_experts = 1, .hidden = 1027, .inner = 1030}, DType::kF32, 3, 1, 5);
  expect_reference(p);
  expect_reference(p, {.accumulate = true});
}

TEST_P(ExpertsBackward, AllTokensOnOneExpertLeaveTheOthersZeros) {
  for (const bool accumulate : {false, true}) {
    Problem p = make_problem({.num_experts = 4, .hidden = 40, .inner = 30, .bias = true},
                             DType::kF32, 70, 1, 37);
    for (Assignment& a : p.assignments) a.expert = 2;
    expect_reference(p, {.accumulate = accumulate});
    const Gradients all = run_back(p, {.accumulate = accumulate});
    const float untouched = accumulate ? 0.75F : 0.0F;
    for (const std::int64_t e : {0, 1, 3}) {
      EXPECT_EQ(all.w13[at(e * 60 * 40)], untouched);
      EXPECT_EQ(all.w2[at((e + 1) * 40 * 30 - 1)], untouched);
      EXPECT_EQ(all.b13[at(e * 60)], untouched);
      EXPECT_EQ(all.b2[at(e * 40)], untouched);
    }
  }
}

TEST_P(ExpertsBackward, LayoutsThreadsAndARecomputedPreactivationDoNotShowInTheBits) {
  ThreadPool two(2);
  ThreadPool three(3);
  for (const DType dtype : kTypes) {
    for (const bool gated : {true, false}) {
      const Problem p =
          make_problem({.num_experts = 6, .hidden = 130, .inner = 90, .gated = gated, .bias = true},
                       dtype, 33, 2, 19);
      const Gradients want = run_back(p);
      for (const Layout& layout : kLayouts) {
        for (ThreadPool* const pool : {static_cast<ThreadPool*>(nullptr), &two, &three}) {
          for (const bool keep : {true, false}) {
            EXPECT_TRUE(run_back(p, {.layout = layout, .keep = keep, .pool = pool}) == want)
                << to_string(dtype) << gated << keep;
          }
        }
      }
    }
  }
}

TEST_P(ExpertsBackward, AGradientAloneHasTheBitsThatItHasAmongAll) {
  const Problem p = make_problem({.num_experts = 3, .hidden = 50, .inner = 40, .bias = true},
                                 DType::kBF16, 20, 2, 23);
  const Gradients all = run_back(p);
  const auto only = [&](auto keep) {
    return run_back(p, {.change = [&](ExpertsBackwardArgs& args) {
                      const ExpertsBackwardArgs full = args;
                      args.drow_weight = {};
                      args.dx_rows = {};
                      args.gradients = {};
                      keep(args, full);
                    }});
  };
  using Args = ExpertsBackwardArgs;
  EXPECT_EQ(only([](Args& a, const Args& f) { a.drow_weight = f.drow_weight; }).weight, all.weight);
  EXPECT_EQ(only([](Args& a, const Args& f) { a.dx_rows = f.dx_rows; }).dx, all.dx);
  EXPECT_EQ(only([](Args& a, const Args& f) { a.gradients.w13 = f.gradients.w13; }).w13, all.w13);
  EXPECT_EQ(only([](Args& a, const Args& f) { a.gradients.w2 = f.gradients.w2; }).w2, all.w2);
  EXPECT_EQ(only([](Args& a, const Args& f) { a.gradients.b13 = f.gradients.b13; }).b13, all.b13);
  EXPECT_EQ(only([](Args& a, const Args& f) { a.gradients.b2 = f.gradients.b2; }).b2, all.b2);
}

TEST_P(ExpertsBackward, DxOfTheComputeTypeIsThatOfF32RoundedOnce) {
  for (const DType dtype : kTypes) {
    const Problem p = make_problem({.num_experts = 3, .hidden = 50, .inner = 40}, dtype, 20, 2, 29);
    Gradients want = run_back(p);
    for (float& value : want.dx) value = round_to(dtype, value);
    EXPECT_TRUE(run_back(p, {.dx = dtype}) == want) << to_string(dtype);
  }
}

/// Whether sums go from registers to the rows of the caller, past the caches or not, or by memory.
TEST_P(ExpertsBackward, GradientsOfTheComputeTypeAreThoseOfF32RoundedOnceWhereverTheyLie) {
  struct Size {
    std::int32_t experts;
    std::int64_t hidden, inner, tokens;
    std::vector<std::size_t> offsets;
  };
  // Padded columns and panels that are cut; large ones of whole lines, whose rows may be streamed.
  for (const Size& size : {Size{3, 130, 90, 20, {0, 2, 16, 32}}, Size{1, 1024, 1024, 3, {0, 2}}}) {
    for (const DType dtype : kTypes) {
      const Problem p =
          make_problem({.num_experts = size.experts, .hidden = size.hidden, .inner = size.inner},
                       dtype, size.tokens, 1, 29);
      for (const bool accumulate : {false, true}) {
        const Gradients want = run_back(p, {.accumulate = accumulate, .offset = 4});
        Gradients rounded = want;
        for (float& value : rounded.w13) value = round_to(dtype, value);
        for (float& value : rounded.w2) value = round_to(dtype, value);
        for (const std::size_t offset : size.offsets) {
          SCOPED_TRACE(testing::Message() << "H " << size.hidden << " " << to_string(dtype)
                                          << " accumulate " << accumulate << " + " << offset);
          if (offset % 4 == 0) {
            EXPECT_TRUE(run_back(p, {.accumulate = accumulate, .offset = offset}) == want);
          }
          if (dtype == DType::kF32) continue;
          EXPECT_TRUE(
              run_back(p, {.accumulate = accumulate, .gradients = dtype, .offset = offset}) ==
              rounded);
        }
      }
    }
  }
}

TEST_P(ExpertsBackward, WhatDoesNotFitIsRefusedByName) {
  const Problem p =
      make_problem({.num_experts = 3, .hidden = 8, .inner = 4}, DType::kBF16, 6, 2, 1);
  const auto refused = [&](const char* words, const std::function<void(ExpertsBackwardArgs&)>& f) {
    expect_error(ErrorCode::kInvalidArgument, words, [&] { (void)run_back(p, {.change = f}); });
  };
  refused("dout is f32", [](ExpertsBackwardArgs& a) { a.dout.dtype = DType::kF32; });
  refused("x", [](ExpertsBackwardArgs& a) { --a.x.rows; });
  refused("dw13", [](ExpertsBackwardArgs& a) { --a.gradients.w13.rows; });
  refused("dw2 is f16", [](ExpertsBackwardArgs& a) { a.gradients.w2.dtype = DType::kF16; });
  refused("preactivation", [](ExpertsBackwardArgs& a) { --a.preactivation.cols; });
  refused("drow_weight", [](ExpertsBackwardArgs& a) { a.drow_weight.shape[0] = 2; });
  refused("dx_rows is f16", [](ExpertsBackwardArgs& a) { a.dx_rows.dtype = DType::kF16; });
  refused("experts have no weights", [](ExpertsBackwardArgs& a) { a.weights = nullptr; });
  refused("dpreactivation overlaps preactivation", [](ExpertsBackwardArgs& a) {
    a.dpreactivation = {const_cast<std::byte*>(a.preactivation.data) + 16, a.preactivation.dtype,
                        a.preactivation.rows, a.preactivation.cols};
  });
  std::vector<std::byte> room(4096);
  const auto with_room = [&](DType dtype, std::int64_t rows) {
    return [&room, dtype, rows](ExpertsBackwardArgs& a) {
      a.weighted_activation = {room.data(), dtype, rows, 4};
    };
  };
  refused("weighted_activation is f32, the weights compute in bf16", with_room(DType::kF32, 64));
  refused("the layout has 12 rows, weighted_activation 3", with_room(DType::kBF16, 3));
  expect_error(ErrorCode::kUnsupported, "not in that of dpreactivation",
               [&] { (void)run_back(p, {.change = with_room(DType::kBF16, 64)}); });
  const auto q8 = load(p, true);
  refused("wants exact weights, not q8", [&](ExpertsBackwardArgs& a) { a.weights = q8.get(); });
}

INSTANTIATE_TEST_SUITE_P(Isa, ExpertsBackward, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

}  // namespace
}  // namespace switchyard::test
