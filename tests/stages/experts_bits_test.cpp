// Bits: of a row wherever it stands, of sums in the fixed order; and what the call reports, rounds
// and refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "testkit/expect_error.hpp"
#include "testkit/experts_support.hpp"

namespace switchyard::test {
namespace {

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
      const auto first = together.begin() + static_cast<std::ptrdiff_t>(i) * p.made.config.hidden;
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), first)) << "assignment " << i;
    }
  }
}

/// Rows that leave the second-level cache, with a depth of one piece and of several.
TEST_P(Experts, ARowHasTheBitsOfARowAloneAmongRowsThatFillACache) {
  for (const std::int64_t hidden : {250, 700}) {
    Problem p =
        make_problem({.num_experts = 1, .hidden = hidden, .inner = 72}, DType::kF32, 250, 1, 61);
    const auto weights = load(p);
    const std::vector<float> together = run_rows(p, *weights, kLayouts[0]);
    const std::vector<Assignment> all = p.assignments;
    for (std::size_t i = 0; i < all.size(); ++i) {
      p.assignments = {all[i]};
      const std::vector<float> alone = run_rows(p, *weights, kLayouts[0]);
      const auto first = together.begin() + static_cast<std::ptrdiff_t>(i) * hidden;
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), first)) << hidden << " row " << i;
    }
  }
}

/// More rows than are taken through a product at once, more tokens than are added up at once.
TEST_P(Experts, ATokenHasTheBitsOfAFewTokensAmongVeryMany) {
  ThreadPool pool(2);
  for (const DType dtype : kTypes) {
    Problem p = make_problem({.num_experts = 3, .hidden = 72, .inner = 50, .bias = true}, dtype,
                             2100, 2, 59);
    const std::int64_t hidden = p.made.config.hidden;
    const auto weights = load(p, false, &pool);
    const Subtree tree{.order = {.num_experts = 3, .groups = 2}, .num_groups = 2};
    const std::vector<float> rows = run_rows(p, *weights, kLayouts[0], &pool);
    const std::vector<float> sums = run_reduced(p, *weights, kLayouts[0], tree, false, &pool);
    const std::vector<Assignment> all = p.assignments;
    const auto chosen = [](const Assignment& a) { return a.token % 19 == 0; };
    p.assignments.clear();
    std::copy_if(all.begin(), all.end(), std::back_inserter(p.assignments), chosen);
    const std::vector<float> few_rows = run_rows(p, *weights, kLayouts[0]);
    auto few_row = few_rows.begin();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!chosen(all[i])) continue;
      const auto row = rows.begin() + static_cast<std::ptrdiff_t>(i) * hidden;
      ASSERT_TRUE(std::equal(row, row + hidden, few_row)) << to_string(dtype) << " row " << i;
      few_row += hidden;
    }
    const std::vector<float> few_sums = run_reduced(p, *weights, kLayouts[0], tree);
    for (std::int64_t t = 0; t < p.num_tokens; t += 19) {
      const auto sum = sums.begin() + t * hidden;
      ASSERT_TRUE(std::equal(sum, sum + hidden, few_sums.begin() + t * hidden))
          << to_string(dtype) << " token " << t;
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
  const std::int64_t hidden = p.made.config.hidden;
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
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.end() - p.made.config.hidden));
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
  const StoredTokens x(p);
  experts({.x = x.matrix,
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
  const StoredTokens x(p);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<std::uint16_t> sums(exact.size());
    experts({.x = x.matrix,
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
  StoredTokens x(p);
  x.matrix.dtype = DType::kBF16;
  EXPECT_EQ(message_of([&] {
              experts({.x = x.matrix,
                       .plan = plan.view(),
                       .weights = weights.get(),
                       .rows = {reinterpret_cast<std::byte*>(rows.data()), DType::kF32, 2, 8}});
            }),
            "invalid argument: x is bf16, the weights compute in f32");
}

}  // namespace
}  // namespace switchyard::test
