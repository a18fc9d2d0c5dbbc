#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "core/half.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/thread_pool.hpp"
#include "tests/expect_error.hpp"

namespace switchyard {
namespace {

using test::message_of;

/// Values of a type, kept as its bytes.
struct Values {
  DType dtype = DType::kF32;
  std::vector<std::byte> bytes;

  [[nodiscard]] double at(std::int64_t i) const { return load_float(bytes.data(), dtype, i); }
};

Values random_values(DType dtype, std::int64_t count, double scale, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Values out{dtype, std::vector<std::byte>(static_cast<std::size_t>(count * size_of(dtype)))};
  for (std::int64_t i = 0; i < count; ++i) {
    store_float(out.bytes.data(), dtype, i, normal(random) * static_cast<float>(scale));
  }
  return out;
}

struct Assignment {
  std::int32_t token;
  std::int32_t expert;
  float weight;
};

/// One layer's experts with made-up weights, and who goes where.
struct Problem {
  ExpertConfig config;
  DType dtype = DType::kF32;
  std::int64_t num_tokens = 0;
  std::vector<Assignment> assignments{};  ///< Sorted by (expert, token, k).
  Values x{}, w13{}, w2{};
  std::vector<float> b13{}, b2{};
  double row_unit = 0;  ///< Rounding of rows, relative to their largest value.
};

Problem make_problem(const ExpertConfig& config, DType dtype, std::int64_t num_tokens,
                     std::int32_t top_k, unsigned seed) {
  std::mt19937 random(seed);
  Problem p{.config = config, .dtype = dtype, .num_tokens = num_tokens};
  const std::int64_t wide = (config.gated ? 2 : 1) * config.inner;
  const std::int64_t experts = config.num_experts;
  p.x = random_values(dtype, num_tokens * config.hidden, 1.0, random);
  p.w13 = random_values(dtype, experts * wide * config.hidden,
                        1.0 / std::sqrt(static_cast<double>(config.hidden)), random);
  p.w2 = random_values(dtype, experts * config.hidden * config.inner,
                       1.0 / std::sqrt(static_cast<double>(config.inner)), random);
  std::normal_distribution<float> normal;
  if (config.bias) {
    p.b13.resize(static_cast<std::size_t>(experts * wide));
    p.b2.resize(static_cast<std::size_t>(experts * config.hidden));
    for (float& b : p.b13) b = normal(random);
    for (float& b : p.b2) b = normal(random);
  }
  std::uniform_int_distribution<std::int32_t> any(0, config.num_experts - 1);
  for (std::int32_t t = 0; t < num_tokens; ++t) {
    for (int k = 0; k < top_k; ++k) p.assignments.push_back({t, any(random), normal(random)});
  }
  std::stable_sort(p.assignments.begin(), p.assignments.end(),
                   [](const Assignment& a, const Assignment& b) { return a.expert < b.expert; });
  return p;
}

/// The plan of a problem in some layout, built without plan().
struct TestPlan {
  std::vector<std::int32_t> expert_begin, expert_rows, row_token, token_begin;
  std::vector<float> row_weight;
  std::vector<std::int64_t> row_of;  ///< Of each assignment.
  std::int64_t rows = 0;

  TestPlan(const Problem& p, const Layout& layout) {
    const auto experts = static_cast<std::size_t>(p.config.num_experts);
    expert_rows.resize(experts);
    for (const Assignment& a : p.assignments) ++expert_rows[static_cast<std::size_t>(a.expert)];
    const std::int32_t most = *std::max_element(expert_rows.begin(), expert_rows.end());
    for (const std::int32_t used : expert_rows) {
      expert_begin.push_back(static_cast<std::int32_t>(rows));
      const std::int32_t n = layout.alignment;
      rows += layout.kind == LayoutKind::kPadded ? most + 1 : (used + n - 1) / n * n;
    }
    expert_begin.push_back(static_cast<std::int32_t>(rows));
    row_token.assign(static_cast<std::size_t>(rows), -1);
    row_weight.assign(static_cast<std::size_t>(rows), 0.0F);
    std::vector<std::int32_t> next = expert_begin;
    for (const Assignment& a : p.assignments) {
      const auto row = static_cast<std::size_t>(next[static_cast<std::size_t>(a.expert)]++);
      row_of.push_back(static_cast<std::int64_t>(row));
      row_token[row] = a.token;
      row_weight[row] = a.weight;
    }
    token_begin.resize(static_cast<std::size_t>(p.num_tokens) + 1);
  }

  PlanView view() {
    const auto of = [](auto& v) {
      return Vector<std::remove_reference_t<decltype(v[0])>>{v.data(),
                                                             {static_cast<std::int64_t>(v.size())}};
    };
    return {.num_experts = static_cast<std::int32_t>(expert_rows.size()),
            .expert_begin = of(expert_begin),
            .expert_rows = of(expert_rows),
            .row_token = of(row_token),
            .row_weight = of(row_weight),
            .token_begin = of(token_begin)};
  }
};

std::unique_ptr<ExpertWeights> load(const Problem& p, bool q8 = false, ThreadPool* pool = nullptr) {
  const auto source = make_memory_source(p.config, p.dtype, p.w13.bytes.data(), p.w2.bytes.data(),
                                         p.b13.data(), p.b2.data());
  return load_experts({.config = p.config,
                       .source = source.get(),
                       .dtype = p.dtype,
                       .num_local = p.config.num_experts,
                       .quantize_q8 = q8,
                       .execution = {.pool = pool}});
}

ConstRawMatrix tokens_of(const Problem& p) {
  return {p.x.bytes.data(), p.dtype, p.num_tokens, p.config.hidden};
}

/// The output row of each assignment, in their order.
std::vector<float> run_rows(const Problem& p, const ExpertWeights& weights, const Layout& layout,
                            ThreadPool* pool = nullptr) {
  TestPlan plan(p, layout);
  const std::int64_t hidden = p.config.hidden;
  std::vector<float> rows(static_cast<std::size_t>(plan.rows * hidden),
                          std::numeric_limits<float>::quiet_NaN());
  experts({.x = tokens_of(p),
           .plan = plan.view(),
           .layout = layout,
           .weights = &weights,
           .rows = {reinterpret_cast<std::byte*>(rows.data()), DType::kF32, plan.rows, hidden},
           .execution = {.pool = pool}});
  std::vector<float> out;
  for (const std::int64_t row : plan.row_of) {
    out.insert(out.end(), rows.begin() + row * hidden, rows.begin() + (row + 1) * hidden);
  }
  return out;
}

std::vector<float> run_reduced(const Problem& p, const ExpertWeights& weights, const Layout& layout,
                               const Subtree& tree, bool each_group = false,
                               ThreadPool* pool = nullptr) {
  TestPlan plan(p, layout);
  const std::int64_t hidden = p.config.hidden;
  const std::int64_t count = p.num_tokens * (each_group ? tree.num_groups : 1);
  std::vector<float> sums(static_cast<std::size_t>(count * hidden),
                          std::numeric_limits<float>::quiet_NaN());
  experts(
      {.x = tokens_of(p),
       .plan = plan.view(),
       .layout = layout,
       .weights = &weights,
       .reduced = {.sums = {reinterpret_cast<std::byte*>(sums.data()), DType::kF32, count, hidden},
                   .subtree = tree,
                   .each_group = each_group},
       .execution = {.pool = pool}});
  return sums;
}

double activation(const ExpertConfig& config, double g) {
  switch (config.activation) {
    case Activation::kSilu: return g / (1 + std::exp(-g));
    case Activation::kGelu: return g * 0.5 * std::erfc(-g / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return 0.5 * g *
             (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g)));
    case Activation::kRelu: return std::max(g, 0.0);
    case Activation::kRelu2: return std::max(g, 0.0) * std::max(g, 0.0);
    case Activation::kClampedSwiglu: {
      const double clipped = std::min(g, static_cast<double>(config.limit));
      return clipped / (1 + std::exp(-static_cast<double>(config.alpha) * clipped));
    }
  }
  return 0;
}

double times_up(const ExpertConfig& config, double h, double u) {
  if (config.activation != Activation::kClampedSwiglu) return h * u;
  const double limit = config.limit;
  return h * (std::clamp(u, -limit, limit) + 1);
}

/// One row through its expert by plain loops in double, and how far float may be from it.
void reference_row(const Problem& p, const Assignment& a, std::vector<double>& y,
                   std::vector<double>& bound) {
  const ExpertConfig& c = p.config;
  const double unit = p.dtype == DType::kF32 ? 0x1p-24 : p.dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;
  const std::int64_t wide = (c.gated ? 2 : 1) * c.inner;
  double largest_x = 0;
  for (std::int64_t k = 0; k < c.hidden; ++k) {
    largest_x = std::max(largest_x, std::abs(p.x.at(a.token * c.hidden + k)));
  }
  const double depth_error = 0x1p-24 * (static_cast<double>(c.hidden) + 8);
  /// The sum, and how far it may be off.
  const auto dot = [&](std::int64_t col, double& off) {
    const std::int64_t row = (a.expert * wide + col) * c.hidden;
    double sum = c.bias ? p.b13[static_cast<std::size_t>(a.expert * wide + col)] : 0;
    double size = std::abs(sum);
    double rounded = 0;
    for (std::int64_t k = 0; k < c.hidden; ++k) {
      rounded += std::abs(p.w13.at(row + k)) * largest_x * p.row_unit;
      const double product = p.w13.at(row + k) * p.x.at(a.token * c.hidden + k);
      sum += product;
      size += std::abs(product);
    }
    off = size * depth_error + rounded;
    return sum;
  };
  std::vector<double> h(static_cast<std::size_t>(c.inner));
  std::vector<double> error(h.size());
  for (std::int64_t i = 0; i < c.inner; ++i) {
    double g_error = 0;
    double u_error = 0;
    const double g = dot(i, g_error);
    const double act = activation(c, g);
    // No activation is steeper than 2.2, but relu2 is by 2g.
    double act_error =
        g_error * (c.activation == Activation::kRelu2 ? 2 * std::abs(g) + g_error : 2.2);
    act_error += 0x1p-21 * std::abs(g);
    double value = act;
    if (c.gated) {
      const double u = dot(c.inner + i, u_error);
      value = times_up(c, act, u);
      const double factor = std::abs(u) + 1;
      act_error =
          act_error * factor + (std::abs(act) + act_error) * u_error + 0x1p-22 * std::abs(value);
    }
    h[static_cast<std::size_t>(i)] = value;
    error[static_cast<std::size_t>(i)] = act_error + unit * (std::abs(value) + act_error) + 0x1p-25;
  }
  double largest_h = 0;
  for (const double value : h) largest_h = std::max(largest_h, std::abs(value));
  for (double& e : error) e += largest_h * p.row_unit;
  for (std::int64_t o = 0; o < c.hidden; ++o) {
    double sum = c.bias ? p.b2[static_cast<std::size_t>(a.expert * c.hidden + o)] : 0;
    double size = std::abs(sum);
    double carried = 0;
    for (std::int64_t i = 0; i < c.inner; ++i) {
      const double w = p.w2.at((a.expert * c.hidden + o) * c.inner + i);
      sum += w * h[static_cast<std::size_t>(i)];
      size += std::abs(w * h[static_cast<std::size_t>(i)]);
      carried += std::abs(w) * error[static_cast<std::size_t>(i)];
    }
    y.push_back(sum);
    bound.push_back(carried + size * 0x1p-24 * (static_cast<double>(c.inner) + 8));
  }
}

void expect_close_to_reference(const Problem& p, const std::vector<float>& rows) {
  std::vector<double> y;
  std::vector<double> bound;
  for (const Assignment& a : p.assignments) reference_row(p, a, y, bound);
  ASSERT_EQ(rows.size(), y.size());
  for (std::size_t i = 0; i < y.size(); ++i) {
    ASSERT_LE(std::abs(rows[i] - y[i]), bound[i]) << "element " << i << " is " << rows[i];
  }
}

/// Each test runs once per instruction set that this machine has.
class Experts : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_isa(GetParam()); }
  void TearDown() override { force_isa(std::nullopt); }
};

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr Activation kActivations[] = {Activation::kSilu,     Activation::kGelu,
                                       Activation::kGeluTanh, Activation::kRelu,
                                       Activation::kRelu2,    Activation::kClampedSwiglu};
const Layout kLayouts[] = {
    {LayoutKind::kCompact, 1}, {LayoutKind::kAligned, 8}, {LayoutKind::kPadded, 1}};

TEST_P(Experts, EveryActivationAgreesWithPlainLoopsInDouble) {
  for (const Activation activation : kActivations) {
    for (const bool gated : {true, false}) {
      if (activation == Activation::kClampedSwiglu && !gated) continue;
      for (const DType dtype : kTypes) {
        const Problem p = make_problem({.num_experts = 3,
                                        .hidden = 65,
                                        .inner = 33,
                                        .gated = gated,
                                        .activation = activation,
                                        .limit = 1.5F,
                                        .bias = gated},
                                       dtype, 9, 2, 7);
        SCOPED_TRACE(testing::Message()
                     << to_string(activation) << " gated " << gated << " " << to_string(dtype));
        expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
      }
    }
  }
}

TEST_P(Experts, OddSizesAgreeWithPlainLoopsInDouble) {
  for (const std::int64_t hidden : {1, 3, 7, 64, 129}) {
    for (const std::int64_t inner : {1, 5, 16, 65}) {
      for (const DType dtype : kTypes) {
        const Problem p = make_problem(
            {.num_experts = 2, .hidden = hidden, .inner = inner, .bias = true}, dtype, 5, 2, 11);
        SCOPED_TRACE(testing::Message()
                     << "H " << hidden << " I " << inner << " " << to_string(dtype));
        expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
      }
    }
  }
}

TEST_P(Experts, AnyNumberOfRowsOfOneExpertAgreesWithPlainLoopsInDouble) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 17, 33, 50}) {
      const Problem p =
          make_problem({.num_experts = 1, .hidden = 40, .inner = 24}, dtype, tokens, 1, 3);
      expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
    }
  }
}

TEST_P(Experts, DeepSumsThatAreCutToFitTheCacheAgreeWithPlainLoopsInDouble) {
  for (const DType dtype : kTypes) {
    const Problem p =
        make_problem({.num_experts = 1, .hidden = 1500, .inner = 20}, dtype, 40, 1, 5);
    expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
  }
}

TEST_P(Experts, UsedRowsHaveTheSameBitsInAllThreeLayouts) {
  for (const DType dtype : kTypes) {
    const Problem p =
        make_problem({.num_experts = 5, .hidden = 48, .inner = 40, .bias = true}, dtype, 21, 3, 13);
    const auto weights = load(p);
    const std::vector<float> compact = run_rows(p, *weights, kLayouts[0]);
    EXPECT_EQ(compact, run_rows(p, *weights, kLayouts[1]));
    EXPECT_EQ(compact, run_rows(p, *weights, kLayouts[2]));
  }
}

TEST_P(Experts, ARowAloneHasTheBitsThatItHasAmongOthers) {
  for (const DType dtype : kTypes) {
    Problem p = make_problem({.num_experts = 4, .hidden = 600, .inner = 40}, dtype, 40, 3, 17);
    const auto weights = load(p);
    const std::vector<float> together = run_rows(p, *weights, kLayouts[0]);
    const std::vector<Assignment> all = p.assignments;
    for (std::size_t i = 0; i < all.size(); i += 7) {
      p.assignments = {all[i]};
      const std::vector<float> alone = run_rows(p, *weights, kLayouts[0]);
      const auto first = together.begin() + static_cast<std::ptrdiff_t>(i) * p.config.hidden;
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), first)) << "assignment " << i;
    }
  }
}

TEST_P(Experts, BitsDoNotDependOnTheNumberOfThreads) {
  for (const DType dtype : kTypes) {
    const Problem p =
        make_problem({.num_experts = 6, .hidden = 200, .inner = 90}, dtype, 33, 2, 19);
    const Subtree tree{.order = {.num_experts = 6, .groups = 4}, .num_groups = 4};
    const auto weights = load(p);
    const std::vector<float> rows = run_rows(p, *weights, kLayouts[0]);
    const std::vector<float> sums = run_reduced(p, *weights, kLayouts[0], tree);
    for (const int threads : {2, 3}) {
      ThreadPool pool(threads);
      const auto loaded = load(p, false, &pool);
      EXPECT_EQ(rows, run_rows(p, *loaded, kLayouts[0], &pool));
      EXPECT_EQ(sums, run_reduced(p, *loaded, kLayouts[0], tree, false, &pool));
    }
  }
}

/// The fixed order, written out: leaves by fma in ascending expert and k, then the tree.
std::vector<float> combine_by_hand(const Problem& p, const std::vector<float>& rows,
                                   const Subtree& tree, bool each_group) {
  const std::int64_t hidden = p.config.hidden;
  std::vector<float> out;
  for (std::int32_t t = 0; t < p.num_tokens; ++t) {
    for (std::int32_t leaf = 0; leaf < (each_group ? tree.num_groups : 1); ++leaf) {
      for (std::int64_t col = 0; col < hidden; ++col) {
        std::vector<float> level;
        for (std::int32_t g = 0; g < tree.num_groups; ++g) {
          float sum = 0.0F;
          for (std::size_t i = 0; i < p.assignments.size(); ++i) {
            const Assignment& a = p.assignments[i];
            const bool here = a.expert >= tree.order.begin(tree.first_group + g) &&
                              a.expert < tree.order.begin(tree.first_group + g + 1);
            if (a.token != t || !here) continue;
            sum = std::fma(
                a.weight,
                rows[i * static_cast<std::size_t>(hidden) + static_cast<std::size_t>(col)], sum);
          }
          level.push_back(sum);
        }
        if (each_group) level = {level[static_cast<std::size_t>(leaf)]};
        while (level.size() > 1) {
          if (level.size() % 2 != 0) level.push_back(0.0F);
          for (std::size_t i = 0; i < level.size() / 2; ++i) {
            level[i] = level[2 * i] + level[2 * i + 1];
          }
          level.resize(level.size() / 2);
        }
        out.push_back(level[0]);
      }
    }
  }
  return out;
}

TEST_P(Experts, FusedSumsHaveTheBitsOfRowsAddedInTheFixedOrder) {
  for (const DType dtype : kTypes) {
    for (const std::int32_t groups : {1, 3, 4, 8}) {
      const Problem p = make_problem({.num_experts = 7, .hidden = 50, .inner = 20, .bias = true},
                                     dtype, 12, 4, 23);
      const auto weights = load(p);
      const std::vector<float> rows = run_rows(p, *weights, kLayouts[0]);
      const Subtree tree{.order = {.num_experts = 7, .groups = groups}, .num_groups = groups};
      for (const bool each_group : {false, true}) {
        const std::vector<float> want = combine_by_hand(p, rows, tree, each_group);
        for (const Layout& layout : kLayouts) {
          EXPECT_EQ(want, run_reduced(p, *weights, layout, tree, each_group)) << groups;
        }
      }
    }
  }
}

TEST_P(Experts, AnExpertThatATokenNamesTwiceIsAddedTwice) {
  Problem p = make_problem({.num_experts = 2, .hidden = 20, .inner = 9}, DType::kF32, 3, 1, 29);
  p.assignments = {{0, 1, 0.5F}, {0, 1, 0.25F}, {2, 1, 1.0F}};
  const auto weights = load(p);
  const Subtree tree{.order = {.num_experts = 2, .groups = 2}, .num_groups = 2};
  EXPECT_EQ(combine_by_hand(p, run_rows(p, *weights, kLayouts[0]), tree, false),
            run_reduced(p, *weights, kLayouts[0], tree));
}

TEST_P(Experts, WithoutTokensOrWithoutRowsTheSumsAreZero) {
  Problem p = make_problem({.num_experts = 3, .hidden = 20, .inner = 9}, DType::kBF16, 4, 1, 31);
  const auto weights = load(p);
  p.assignments.clear();
  const Subtree tree{.order = {.num_experts = 3, .groups = 8}, .num_groups = 8};
  EXPECT_EQ(std::vector<float>(80, 0.0F), run_reduced(p, *weights, kLayouts[0], tree));
  p.num_tokens = 0;
  EXPECT_TRUE(run_reduced(p, *weights, kLayouts[0], tree).empty());
}

TEST_P(Experts, AllTokensOnOneExpertAgreeWithPlainLoopsInDouble) {
  Problem p = make_problem({.num_experts = 8, .hidden = 40, .inner = 30}, DType::kF32, 70, 1, 37);
  for (Assignment& a : p.assignments) a.expert = 5;
  expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
}

/// What 8-bit weights stand for: scale * round(w / scale), scale = largest of 32 / 127.
Values dequantised(const Values& weights, std::int64_t depth) {
  Values out{DType::kF32, std::vector<std::byte>(weights.bytes.size() * 4 /
                                                 static_cast<std::size_t>(size_of(weights.dtype)))};
  const std::int64_t count = static_cast<std::int64_t>(out.bytes.size()) / 4;
  for (std::int64_t row = 0; row < count; row += depth) {
    for (std::int64_t first = row; first < row + depth; first += 32) {
      const std::int64_t last = std::min(first + 32, row + depth);
      float largest = 0;
      for (std::int64_t i = first; i < last; ++i) {
        largest = std::max(largest, std::abs(static_cast<float>(weights.at(i))));
      }
      const float scale = largest / 127;
      for (std::int64_t i = first; i < last; ++i) {
        const auto value = static_cast<float>(weights.at(i));
        store_float(out.bytes.data(), DType::kF32, i, std::nearbyint(value / scale) * scale);
      }
    }
  }
  return out;
}

TEST_P(Experts, EightBitWeightsAgreeWithPlainLoopsOverTheFloatsTheyStandFor) {
  for (const DType dtype : kTypes) {
    Problem p = make_problem({.num_experts = 2, .hidden = 70, .inner = 45}, dtype, 20, 2, 41);
    const std::vector<float> rows = run_rows(p, *load(p, true), kLayouts[0]);
    p.w13 = dequantised(p.w13, p.config.hidden);
    p.w2 = dequantised(p.w2, p.config.inner);
    p.row_unit = 0x1p-15;
    expect_close_to_reference(p, rows);
  }
}

TEST_P(Experts, EightBitWeightsKeepBitsOverRowsAndThreads) {
  Problem p = make_problem({.num_experts = 3, .hidden = 70, .inner = 45}, DType::kBF16, 30, 2, 53);
  const auto weights = load(p, true);
  const std::vector<float> together = run_rows(p, *weights, kLayouts[0]);
  ThreadPool pool(2);
  EXPECT_EQ(together, run_rows(p, *weights, kLayouts[0], &pool));
  EXPECT_EQ(together, run_rows(p, *weights, kLayouts[2]));
  const Assignment last = p.assignments.back();
  p.assignments = {last};
  const std::vector<float> alone = run_rows(p, *weights, kLayouts[0]);
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.end() - p.config.hidden));
}

TEST_P(Experts, ANaNOrInfinityReachesTheOutputOfItsRowAndOfNoOther) {
  for (const bool q8 : {false, true}) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Problem p =
          make_problem({.num_experts = 1, .hidden = 40, .inner = 40}, DType::kF32, 9, 1, 59);
      const auto weights = load(p, q8);
      const std::vector<float> good = run_rows(p, *weights, kLayouts[0]);
      store_float(p.x.bytes.data(), DType::kF32, 3 * 40 + 17, bad);
      const std::vector<float> rows = run_rows(p, *weights, kLayouts[0]);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (i / 40 == 3) {
          EXPECT_FALSE(std::isfinite(rows[i])) << i;
        } else {
          EXPECT_EQ(rows[i], good[i]) << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Experts, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

TEST(ExpertsContract, TheWorkReportedCountsUsedAndExecutedRows) {
  struct Recorder : StageRecorder {
    std::vector<std::string> names;
    std::vector<StageWork> work;
    void begin(std::string_view, void*) override {}
    void end(std::string_view stage, const StageWork& done, void*) override {
      names.emplace_back(stage);
      work.push_back(done);
    }
  } recorder;
  Problem p = make_problem({.num_experts = 2, .hidden = 16, .inner = 8}, DType::kF32, 5, 1, 43);
  for (Assignment& a : p.assignments) a.expert = 1;
  const auto weights = load(p);
  const Layout layout{LayoutKind::kAligned, 4};
  TestPlan plan(p, layout);
  std::vector<float> sums(5 * 16);
  experts({.x = tokens_of(p),
           .plan = plan.view(),
           .layout = layout,
           .weights = weights.get(),
           .reduced = {.sums = {reinterpret_cast<std::byte*>(sums.data()), DType::kF32, 5, 16},
                       .subtree = {.order = {2, 1}, .num_groups = 1}},
           .execution = {.recorder = &recorder}});
  EXPECT_EQ(recorder.names, (std::vector<std::string>{"gemm1+activation", "gemm2+combine"}));
  EXPECT_EQ(recorder.work[0].flops, 2.0 * 2 * 16 * 8 * 5);
  EXPECT_EQ(recorder.work[0].flops_executed, 2.0 * 2 * 16 * 8 * 8);
  EXPECT_EQ(recorder.work[1].flops, 2.0 * 16 * 8 * 5);
}

TEST(ExpertsContract, SumsAreRoundedOnceToTheTypeAskedFor) {
  const Problem p =
      make_problem({.num_experts = 3, .hidden = 24, .inner = 10}, DType::kBF16, 4, 2, 47);
  const auto weights = load(p);
  const Subtree tree{.order = {3, 2}, .num_groups = 2};
  const std::vector<float> exact = run_reduced(p, *weights, kLayouts[0], tree);
  TestPlan plan(p, kLayouts[0]);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<std::uint16_t> sums(exact.size());
    experts({.x = tokens_of(p),
             .plan = plan.view(),
             .weights = weights.get(),
             .reduced = {.sums = {reinterpret_cast<std::byte*>(sums.data()), dtype, 4, 24},
                         .subtree = tree}});
    for (std::size_t i = 0; i < exact.size(); ++i) {
      EXPECT_EQ(load_float(sums.data(), dtype, static_cast<std::int64_t>(i)),
                round_to(dtype, exact[i]));
    }
  }
}

TEST(ExpertsContract, WrongConfigurationsAreNamed) {
  EXPECT_EQ(message_of([] { check(ExpertConfig{.num_experts = 0, .hidden = 1, .inner = 1}); }),
            "invalid argument: num_experts=0, want at least 1");
  EXPECT_EQ(message_of([] { check(ExpertConfig{.num_experts = 1, .hidden = 0, .inner = 1}); }),
            "invalid argument: hidden=0, want at least 1");
  EXPECT_EQ(message_of([] {
              check(ExpertConfig{.num_experts = 1,
                                 .hidden = 1,
                                 .inner = 1,
                                 .gated = false,
                                 .activation = Activation::kClampedSwiglu});
            }),
            "invalid argument: activation clamped_swiglu needs gated experts");
}

TEST(ExpertsContract, TokensOfAnotherTypeThanTheWeightsAreAnError) {
  const Problem p = make_problem({.num_experts = 1, .hidden = 8, .inner = 8}, DType::kF32, 2, 1, 1);
  const auto weights = load(p);
  TestPlan plan(p, kLayouts[0]);
  std::vector<float> rows(16);
  ConstRawMatrix x = tokens_of(p);
  x.dtype = DType::kBF16;
  EXPECT_EQ(message_of([&] {
              experts({.x = x,
                       .plan = plan.view(),
                       .weights = weights.get(),
                       .rows = {reinterpret_cast<std::byte*>(rows.data()), DType::kF32, 2, 8}});
            }),
            "invalid argument: x is bf16, the weights compute in f32");
}

}  // namespace
}  // namespace switchyard
