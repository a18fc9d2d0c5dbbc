// Values: rows of experts against the reference in double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference/expert.hpp"
#include "testkit/experts_support.hpp"

namespace switchyard::test {
namespace {

/// Rows of the assignments, each value within what the reference admits.
void expect_close_to_reference(const Problem& p, const std::vector<float>& rows, bool q8 = false) {
  const ExpertConfig& config = p.made.config;
  const reference::Precision precision{.compute = p.made.dtype, .quantize_q8 = q8};
  ASSERT_EQ(rows.size(), p.assignments.size() * static_cast<std::size_t>(config.hidden));
  const auto source = p.made.source();
  std::vector<reference::ExpertMatrices> matrices;
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    matrices.push_back(reference::read_expert(config, *source, e, precision));
  }
  std::size_t i = 0;
  for (const Assignment& a : p.assignments) {
    const std::vector<double> x(p.x.begin() + a.token * config.hidden,
                                p.x.begin() + (a.token + 1) * config.hidden);
    for (const reference::Bounded& want : reference::expert_row(
             config, matrices[static_cast<std::size_t>(a.expert)], x, precision)) {
      ASSERT_TRUE(reference::admits(want, DType::kF32, double{rows[i]}))
          << "element " << i << " is " << rows[i] << ", want " << want.value << " +- "
          << want.error;
      ++i;
    }
  }
}

constexpr Activation kActivations[] = {
    Activation::kSilu,  Activation::kGelu,          Activation::kGeluTanh, Activation::kRelu,
    Activation::kRelu2, Activation::kClampedSwiglu, Activation::kIdentity};

TEST_P(Experts, EveryActivationAgreesWithTheReferenceInDouble) {
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

TEST_P(Experts, OddSizesAgreeWithTheReferenceInDouble) {
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

TEST_P(Experts, AnyNumberOfRowsOfOneExpertAgreesWithTheReferenceInDouble) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 17, 33, 50}) {
      const Problem p =
          make_problem({.num_experts = 1, .hidden = 40, .inner = 24}, dtype, tokens, 1, 3);
      expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
    }
  }
}

TEST_P(Experts, DeepSumsThatAreCutToFitTheCacheAgreeWithTheReferenceInDouble) {
  for (const DType dtype : kTypes) {
    const Problem p =
        make_problem({.num_experts = 1, .hidden = 1500, .inner = 20}, dtype, 40, 1, 5);
    expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
  }
}

TEST_P(Experts, AllTokensOnOneExpertAgreeWithTheReferenceInDouble) {
  Problem p = make_problem({.num_experts = 8, .hidden = 40, .inner = 30}, DType::kF32, 70, 1, 37);
  for (Assignment& a : p.assignments) a.expert = 5;
  expect_close_to_reference(p, run_rows(p, *load(p), kLayouts[0]));
}

TEST_P(Experts, EightBitWeightsAgreeWithTheReferencesOwn) {
  for (const DType dtype : kTypes) {
    const Problem p = make_problem({.num_experts = 2, .hidden = 70, .inner = 45}, dtype, 20, 2, 41);
    expect_close_to_reference(p, run_rows(p, *load(p, true), kLayouts[0]), true);
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
      p.x[3 * 40 + 17] = bad;
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
