// AdamW, clipping and schedules against their formulas in double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "switchyard/models/optimizer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard::test {
namespace {

using models::AdamW;
using models::AdamWConfig;
using models::ParameterTensor;
using models::Schedule;

struct Tensors {
  std::vector<float> value, gradient;
  std::vector<ParameterTensor> list;
};

/// A matrix of more than one piece, and a vector.
Tensors make_tensors(float scale = 1) {
  constexpr std::int64_t kRows = 130, kCols = 129, kVector = 33;
  Tensors t;
  t.value = random_floats(kRows * kCols + kVector, 1);
  t.gradient = random_floats(kRows * kCols + kVector, 2, scale);
  t.list = {{.name = "a", .shape = {kRows, kCols}, .decay = true},
            {.name = "b", .shape = {kVector}}};
  t.list[0].value = t.value.data(), t.list[0].gradient = t.gradient.data();
  t.list[1].value = t.value.data() + kRows * kCols;
  t.list[1].gradient = t.gradient.data() + kRows * kCols;
  for (ParameterTensor& tensor : t.list)
    tensor.parts = {{.name = tensor.name, .shape = tensor.shape}};
  return t;
}

TEST(ModelOptimizer, AdamWIsItsFormulaWithAndWithoutClipping) {
  for (const double clip : {0.0, 1.0, 1e6}) {
    Tensors t = make_tensors();
    const AdamWConfig config{.beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1, .clip = clip};
    AdamW optimizer(t.list, config);
    std::vector<double> p(t.value.begin(), t.value.end()), m(p.size()), v(p.size());
    const std::size_t matrix = std::size_t(t.list[0].size());
    for (int step = 1; step <= 5; ++step) {
      const std::vector<float> gradient =
          random_floats(std::ssize(t.gradient), static_cast<unsigned>(step) + 10);
      std::copy(gradient.begin(), gradient.end(), t.gradient.begin());
      double squares = 0;
      for (const float g : t.gradient) squares += double{g} * double{g};
      const double norm = std::sqrt(squares), rate = 0.01 / step;
      const double factor = clip > 0 && norm > clip ? clip / norm : 1;
      for (std::size_t i = 0; i < p.size(); ++i) {
        const double g = double{t.gradient[i]} * factor;
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.95 * v[i] + 0.05 * g * g;
        const double of = m[i] / (1 - std::pow(0.9, step)) /
                          (std::sqrt(v[i] / (1 - std::pow(0.95, step))) + 1e-8);
        p[i] = p[i] * (i < matrix ? 1 - rate * 0.1 : 1) - rate * of;
      }
      EXPECT_NEAR(optimizer.step(rate), norm, 1e-9 * norm);
    }
    EXPECT_EQ(optimizer.steps(), 5);
    for (std::size_t i = 0; i < p.size(); ++i) {
      ASSERT_NEAR(double{t.value[i]}, p[i], 2e-6 * (1 + std::abs(p[i]))) << i;
    }
  }
}

TEST(ModelOptimizer, AStepHasTheSameBitsForAnyNumberOfThreads) {
  std::vector<float> first;
  for (const int threads : {1, 2, 3}) {
    Tensors t = make_tensors();
    ThreadPool pool(threads);
    AdamW optimizer(t.list, {});
    for (int step = 0; step < 3; ++step) optimizer.step(1e-2, &pool);
    if (threads == 1) first = t.value;
    EXPECT_EQ(t.value, first) << threads;
  }
}

TEST(ModelOptimizer, AStepOfAGradientThatIsNotFiniteChangesNothing) {
  Tensors t = make_tensors();
  t.gradient[20000 % t.gradient.size()] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> before = t.value;
  AdamW optimizer(t.list, {});
  EXPECT_TRUE(std::isnan(optimizer.step(1e-2)));
  EXPECT_EQ(t.value, before);
  EXPECT_EQ(optimizer.steps(), 0);
}

TEST(ModelOptimizer, AStateThatIsPutBackGoesOnWithTheSameBits) {
  Tensors whole = make_tensors(), half = make_tensors();
  AdamW a(whole.list, {}), b(half.list, {});
  for (int step = 0; step < 2; ++step) a.step(1e-2), b.step(1e-2);
  AdamW c(half.list, {});
  for (std::size_t i = 0; i < 2; ++i) {
    std::copy(b.m(i).begin(), b.m(i).end(), c.m(i).begin());
    std::copy(b.v(i).begin(), b.v(i).end(), c.v(i).begin());
  }
  c.set_steps(b.steps());
  a.step(1e-2), c.step(1e-2);
  EXPECT_EQ(whole.value, half.value);
}

TEST(ModelOptimizer, SchedulesRiseStayAndFallAsTheyAreDescribed) {
  const auto at = [](const Schedule& schedule, std::int64_t step) {
    return models::learning_rate(schedule, step);
  };
  Schedule schedule{
      .kind = Schedule::Kind::kCosine, .peak = 2, .warmup = 4, .steps = 15, .final_share = 0.1};
  EXPECT_DOUBLE_EQ(at(schedule, 0), 0.5);
  EXPECT_DOUBLE_EQ(at(schedule, 3), 2);
  EXPECT_DOUBLE_EQ(at(schedule, 4), 2);
  EXPECT_DOUBLE_EQ(at(schedule, 9), 1.1);  // half way
  EXPECT_DOUBLE_EQ(at(schedule, 14), 0.2);
  EXPECT_DOUBLE_EQ(at(schedule, 99), 0.2);
  schedule.kind = Schedule::Kind::kWsd, schedule.decay = 3;
  EXPECT_DOUBLE_EQ(at(schedule, 11), 2);
  EXPECT_DOUBLE_EQ(at(schedule, 13), 1.1);
  EXPECT_DOUBLE_EQ(at(schedule, 14), 0.2);
  schedule.kind = Schedule::Kind::kConstant;
  EXPECT_DOUBLE_EQ(at(schedule, 14), 2);
}

TEST(ModelOptimizer, WhatIsOutOfRangeIsNamed) {
  const auto bad = [](const char* words, const Schedule& schedule) {
    expect_error(ErrorCode::kInvalidArgument, words, [&] { models::check(schedule); });
  };
  bad("steps=0", {.steps = 0});
  bad("warmup=3", {.warmup = 3, .steps = 2});
  bad("decay=2", {.warmup = 1, .steps = 2, .decay = 2});
  bad("final_share=2", {.final_share = 2});
  expect_error(ErrorCode::kInvalidArgument, "constant, cosine, wsd",
               [] { (void)models::parse_schedule("linear"); });
  expect_error(ErrorCode::kInvalidArgument, "beta2=1",
               [] { models::check(AdamWConfig{.beta2 = 1}); });
}

}  // namespace
}  // namespace switchyard::test
