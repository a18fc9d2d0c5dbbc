// Values: rows of experts against plain loops in double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "testkit/experts_support.hpp"

namespace switchyard::test {
namespace {

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

constexpr Activation kActivations[] = {Activation::kSilu,     Activation::kGelu,
                                       Activation::kGeluTanh, Activation::kRelu,
                                       Activation::kRelu2,    Activation::kClampedSwiglu};

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

TEST_P(Experts, AllTokensOnOneExpertAgreeWithPlainLoopsInDouble) {
  Problem p = make_problem({.num_experts = 8, .hidden = 40, .inner = 30}, DType::kF32, 70, 1, 37);
  for (Assignment& a : p.assignments) a.expert = 5;
  expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
}

/// What 8-bit weights stand for: scale * round(w / scale), scale = largest of 32 / 127 as bf16,
/// rounded up.
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
      const std::uint16_t near = float_to_bf16(largest / 127);
      const bool is_below = bf16_to_float(near) < largest / 127;
      const float scale = bf16_to_float(static_cast<std::uint16_t>(is_below ? near + 1 : near));
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

}  // namespace
}  // namespace switchyard::test
