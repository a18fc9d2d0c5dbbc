// Soft-MoE on a CPU: against the reference in double and its differences, and what must hold of any
// mixing.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"
#include "tests/stages/soft_moe_case.hpp"

namespace switchyard::test {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Different shapes, each with made-up numbers.
std::vector<SoftMoeCase> some_cases() {
  std::vector<SoftMoeCase> cases{
      {.config = {.slots = 2, .scale = 1.5F}, .num_tokens = 9},
      {.config = {.slots = 1, .group = 5, .normalize = false}, .num_tokens = 15},
      {.config = {.slots = 3, .group = 4, .sequence = 12, .causal = true, .scale = 3.0F},
       .num_tokens = 24},
      {.config = {.slots = 2, .group = 1}, .num_tokens = 3},
      {.config = {.slots = 40, .scale = 0.5F},
       .num_tokens = 70,
       .experts = {.num_experts = 2, .hidden = 33, .inner = 17, .gated = false}},
  };
  std::uint64_t seed = 1;
  for (SoftMoeCase& c : cases) c.fill(seed++);
  return cases;
}

double largest(const auto& values) {
  double most = 0;
  for (const auto value : values) most = std::max(most, std::abs(static_cast<double>(value)));
  return most;
}

void expect_near(const Floats& have, const Doubles& want, double bound) {
  ASSERT_EQ(have.size(), want.size());
  const double size = std::max(1e-3, largest(want));
  for (std::size_t i = 0; i < have.size(); ++i) {
    ASSERT_NEAR(double{have[i]}, want[i], bound * size) << "number " << i;
  }
}

TEST(SoftMoe, OutputsAndBothWeightsAreThoseOfTheReference) {
  for (const SoftMoeCase& c : some_cases()) {
    const reference::SoftMoeResult want = reference::soft_moe(c.in_double());
    const SoftMoeResults have = run_soft_moe(c);
    expect_near(have.y, want.y, 3e-6);
    expect_near(have.dispatch, want.dispatch, 3e-6);
    expect_near(have.combine, want.combine, 3e-6);
    EXPECT_EQ(soft_moe_output(c), have.y) << "inference has the bits of training";
  }
}

/// d sum(y * dy) / d each of the values, by differences of the reference.
Doubles differences(const SoftMoeCase& c,
                    const std::function<double*(reference::SoftMoeProblem&, std::int64_t)>& value,
                    std::int64_t count) {
  reference::SoftMoeProblem problem = c.in_double();
  const auto loss = [&] {
    const Doubles y = reference::soft_moe(problem).y;
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * double{c.dy[i]};
    return sum;
  };
  Doubles result;
  for (std::int64_t i = 0; i < count; ++i) {
    double& one = *value(problem, i);
    const double middle = one;
    const double step = 1e-5;
    one = middle + step;
    const double above = loss();
    one = middle - step;
    const double below = loss();
    one = middle;
    result.push_back((above - below) / (2 * step));
  }
  return result;
}

TEST(SoftMoe, GradientsAreDifferencesOfTheReference) {
  using Problem = reference::SoftMoeProblem;
  std::vector<SoftMoeCase> cases = some_cases();
  cases.pop_back();  // too many numbers for differences
  for (const SoftMoeCase& c : cases) {
    const SoftMoeResults have = run_soft_moe(c);
    const auto hold = [&](const Floats& gradient, Doubles Problem::*values) {
      expect_near(gradient,
                  differences(
                      c, [&](Problem& p, std::int64_t i) { return &(p.*values)[at(i)]; },
                      std::ssize(gradient)),
                  1e-5);
    };
    hold(have.dx, &Problem::x);
    hold(have.dphi, &Problem::phi);
    hold(have.dw13, &Problem::w13);
    hold(have.dw2, &Problem::w2);
    expect_near(have.dscale,
                differences(
                    c, [](Problem& p, std::int64_t) { return &p.scale; }, 1),
                1e-5);
  }
}

TEST(SoftMoe, EverySlotMixesItsGroupAndEveryTokenAllSlots) {
  for (const SoftMoeCase& c : some_cases()) {
    const SoftMoeResults r = run_soft_moe(c);
    const std::int64_t slots = c.num_slots();
    const std::int64_t m = c.config.group > 0 ? c.config.group : c.num_tokens;
    const std::int64_t sequence = c.config.sequence > 0 ? c.config.sequence : c.num_tokens;
    for (std::int64_t t = 0; t < c.num_tokens; ++t) {
      const bool reads = !c.config.causal || t % sequence >= m;
      const auto row = r.combine.begin() + t * slots;
      EXPECT_NEAR(std::accumulate(row, row + slots, 0.0), reads ? 1.0 : 0.0, 1e-6) << t;
    }
    for (std::int64_t first = 0; first < c.num_tokens; first += m) {
      const bool is_read = !c.config.causal || (first + m) % sequence != 0;
      for (std::int64_t s = 0; s < slots; ++s) {
        double sum = 0;
        for (std::int64_t t = first; t < first + m; ++t)
          sum += double{r.dispatch[at(t * slots + s)]};
        EXPECT_NEAR(sum, is_read ? 1.0 : 0.0, 1e-6) << first << " " << s;
      }
    }
  }
}

/// The rows of a matrix in another order.
Floats reordered(const Floats& rows, std::int64_t cols, const std::vector<std::int64_t>& order) {
  Floats result;
  for (const std::int64_t row : order) {
    result.insert(result.end(), rows.begin() + row * cols, rows.begin() + (row + 1) * cols);
  }
  return result;
}

TEST(SoftMoe, TokensOfAGroupInAnotherOrderHaveTheirOutputsInThatOrder) {
  SoftMoeCase c{.config = {.slots = 2, .group = 6}, .num_tokens = 12};
  c.fill(7);
  const std::vector<std::int64_t> order{3, 0, 5, 1, 4, 2, 11, 6, 9, 8, 7, 10};
  const Floats before = soft_moe_output(c);
  const std::int64_t hidden = c.experts.hidden;
  c.x = reordered(c.x, hidden, order);
  const Floats want = reordered(before, hidden, order);
  expect_near(soft_moe_output(c), Doubles(want.begin(), want.end()), 2e-6);
}

TEST(SoftMoe, ExpertsWithTheirSlotsInAnotherOrderGiveTheSameOutputs) {
  SoftMoeCase c{.config = {.slots = 2}, .num_tokens = 8};
  c.fill(8);
  const Floats before = soft_moe_output(c);
  const std::vector<std::int64_t> order{2, 0, 1};
  const std::int64_t hidden = c.experts.hidden, inner = c.experts.inner;
  c.phi = reordered(c.phi, 2 * hidden, order);
  c.w13 = reordered(c.w13, 2 * inner * hidden, order);
  c.w2 = reordered(c.w2, hidden * inner, order);
  expect_near(soft_moe_output(c), Doubles(before.begin(), before.end()), 2e-6);
}

/// Whether outputs of tokens before `from` keep their bits when the tokens from there on change.
bool prefix_holds(SoftMoeCase c, std::int64_t from) {
  const Floats before = soft_moe_output(c);
  const std::int64_t first = from * c.experts.hidden;
  for (std::size_t i = at(first); i < c.x.size(); ++i) c.x[i] = 3.0F - c.x[i];
  const Floats after = soft_moe_output(c);
  return std::equal(before.begin(), before.begin() + first, after.begin());
}

TEST(SoftMoe, CausalOutputsDoNotDependOnLaterTokensAndOthersDo) {
  SoftMoeCase c{.config = {.slots = 2, .group = 4, .causal = true}, .num_tokens = 16};
  c.fill(9);
  for (std::int64_t from = 1; from < c.num_tokens; ++from) EXPECT_TRUE(prefix_holds(c, from));
  c.config.causal = false;
  for (const std::int64_t from : {1, 6, 15}) EXPECT_FALSE(prefix_holds(c, from));
  EXPECT_TRUE(prefix_holds(c, 8)) << "groups do not see each other";
}

TEST(SoftMoe, CausalSequencesDoNotSeeEachOther) {
  SoftMoeCase c{.config = {.slots = 2, .group = 2, .sequence = 6, .causal = true},
                .num_tokens = 12};
  c.fill(10);
  const Floats before = soft_moe_output(c);
  for (std::int64_t i = 0; i < 6 * c.experts.hidden; ++i) c.x[at(i)] += 1.0F;
  const Floats after = soft_moe_output(c);
  EXPECT_TRUE(std::equal(before.begin() + 6 * c.experts.hidden, before.end(),
                         after.begin() + 6 * c.experts.hidden));
}

TEST(SoftMoe, BitsDoNotDependOnThreadsOrOnWhetherPreActivationsAreKept) {
  ThreadPool three(3);
  for (SoftMoeCase c : some_cases()) {
    const SoftMoeResults want = run_soft_moe(c);
    c.pool = &three;
    EXPECT_TRUE(run_soft_moe(c) == want);
    c.recompute = Recompute::kActivationInput;
    EXPECT_TRUE(run_soft_moe(c) == want);
  }
}

TEST(SoftMoe, GradientsOfParametersAreAddedWhereAsked) {
  const SoftMoeCase c = some_cases()[0];
  const SoftMoeResults want = run_soft_moe(c);
  const SoftMoeResults have = run_soft_moe(c, true, 2.0F);
  const auto plus_two = [](const Floats& values) {
    Doubles result(values.begin(), values.end());
    for (double& value : result) value += 2.0;
    return result;
  };
  EXPECT_EQ(have.dx, want.dx);
  expect_near(have.dphi, plus_two(want.dphi), 1e-6);
  expect_near(have.dscale, plus_two(want.dscale), 1e-6);
  expect_near(have.dw13, plus_two(want.dw13), 1e-6);
  expect_near(have.dw2, plus_two(want.dw2), 1e-6);
}

TEST(SoftMoe, OneTokenGivesEverySlotItself) {
  SoftMoeCase c{.config = {.slots = 2}, .num_tokens = 1};
  c.fill(11);
  const SoftMoeResults r = run_soft_moe(c);
  for (const float weight : r.dispatch) EXPECT_EQ(weight, 1.0F);
  expect_near(r.y, reference::soft_moe(c.in_double()).y, 3e-6);
}

TEST(SoftMoe, NoTokensAreNoWork) {
  SoftMoeCase c{.config = {.slots = 2}, .num_tokens = 0};
  c.fill(12);
  const SoftMoeResults r = run_soft_moe(c);
  for (const Floats& gradient : {r.dphi, r.dscale, r.dw13, r.dw2}) {
    for (const float value : gradient) EXPECT_EQ(value, 0.0F);
  }
}

TEST(SoftMoe, ASequenceOfOneCausalGroupIsZeroAndHasNoGradient) {
  SoftMoeCase c{.config = {.slots = 2, .causal = true}, .num_tokens = 4};
  c.fill(13);
  const SoftMoeResults r = run_soft_moe(c);
  for (const Floats& zeros : {r.y, r.dx, r.dphi, r.dscale, r.dw13, r.dw2}) {
    for (const float value : zeros) EXPECT_EQ(value, 0.0F);
  }
}

TEST(SoftMoe, LogitsFarApartUnderflowToWeightsOfAlmostZero) {
  SoftMoeCase c{.config = {.slots = 2, .normalize = false, .scale = 400.0F}, .num_tokens = 6};
  c.fill(14);
  const reference::SoftMoeResult want = reference::soft_moe(c.in_double());
  const SoftMoeResults have = run_soft_moe(c);
  expect_near(have.dispatch, want.dispatch, 1e-3);
  for (const float value : have.dx) EXPECT_TRUE(std::isfinite(value));
}

TEST(SoftMoe, Bf16TokensAndWeightsComeNearTheReference) {
  SoftMoeCase c{.config = {.slots = 4, .group = 16}, .num_tokens = 32};
  c.fill(15);
  const auto as_bf16 = [](Floats& values) {
    std::vector<std::byte> stored = stored_as(DType::kBF16, values);
    values = loaded_as_floats(DType::kBF16, stored);
    return stored;
  };
  const std::vector<std::byte> x = as_bf16(c.x), w13 = as_bf16(c.w13), w2 = as_bf16(c.w2);
  const auto source = make_memory_source(c.experts, DType::kBF16, w13.data(), w2.data());
  const auto weights = load_experts({.config = c.experts,
                                     .source = source.get(),
                                     .dtype = DType::kBF16,
                                     .num_local = c.experts.num_experts});
  Floats y(c.x.size());
  soft_moe({.x = {x.data(), DType::kBF16, c.num_tokens, c.experts.hidden},
            .phi = raw_of(c.phi, c.experts.hidden),
            .weights = weights.get(),
            .config = c.config,
            .out = raw_of(y, c.experts.hidden)});
  expect_near(y, reference::soft_moe(c.in_double()).y, 2e-2);
}

TEST(SoftMoe, RefusesByNameWhatDoesNotFit) {
  const auto refuse = [](const std::string& words, const std::function<void(SoftMoeCase&)>& spoil,
                         ErrorCode code = ErrorCode::kInvalidArgument) {
    SoftMoeCase c{.config = {.slots = 2}, .num_tokens = 12};
    c.fill(16);
    spoil(c);
    expect_error(code, words, [&] { soft_moe_output(c); });
  };
  refuse("group=5 does not divide the 12 tokens", [](auto& c) { c.config.group = 5; });
  refuse("sequence=7 does not divide the 12 tokens", [](auto& c) { c.config.sequence = 7; });
  refuse("group=4 does not divide the 6 tokens of a sequence", [](auto& c) {
    c.config.group = 4;
    c.config.sequence = 6;
  });
  refuse("group=-1", [](auto& c) { c.config.group = -1; });
  refuse("slots=0", [](auto& c) { c.config.slots = 0; });
  refuse("scale=inf", [](auto& c) { c.config.scale = HUGE_VALF; });
  refuse("phi has 6 rows, want num_experts=3 times slots=3", [](auto& c) { c.config.slots = 3; });
  refuse("the logit of token 4 and slot 0 is nan", [](auto& c) {
    c.x[4 * 10 + 3] = std::nanf("");
    c.x[9 * 10] = std::nanf("");
  });
}

TEST(SoftMoe, WhatIsSavedServesOneBackward) {
  const SoftMoeCase c = some_cases()[0];
  const auto weights = weights_of(c);
  const std::int64_t hidden = c.experts.hidden;
  SavedSoftMoe saved;
  Floats y(c.x.size()), dx(c.x.size());
  const auto back = [&] {
    soft_moe_backward({.saved = &saved,
                       .phi = raw_of(c.phi, hidden),
                       .weights = weights.get(),
                       .dout = raw_of(c.dy, hidden),
                       .dx = raw_of(dx, hidden)});
  };
  expect_error(ErrorCode::kInvalidArgument, "no soft_moe() has filled", back);
  soft_moe({.x = raw_of(c.x, hidden),
            .phi = raw_of(c.phi, hidden),
            .weights = weights.get(),
            .config = c.config,
            .out = raw_of(y, hidden),
            .saved = &saved});
  EXPECT_TRUE(saved.ready());
  EXPECT_EQ(soft_moe_workspace_bytes(*weights, c.config, c.num_tokens), 0) << "scratch is a GPU's";
  EXPECT_EQ(soft_moe_backward_workspace_bytes(*weights, c.config, c.num_tokens), 0);
  const std::int64_t rows = c.num_slots();
  EXPECT_EQ(saved.bytes(),
            4 * (c.num_tokens * (hidden + rows) + 2 * rows * hidden + rows * 2 * c.experts.inner));
  back();
  EXPECT_EQ(dx, run_soft_moe(c).dx) << "gradients that nobody asks for change no other";
  EXPECT_FALSE(saved.ready());
  expect_error(ErrorCode::kInvalidArgument, "was used by a backward already", back);
}

}  // namespace
}  // namespace switchyard::test
