#pragma once

// What the tests of experts() share: made-up layers with a plan, running them on every instruction
// set that the machine has.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "switchyard/cpu_isa.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/made_experts.hpp"

namespace switchyard::test {

struct Assignment {
  std::int32_t token;
  std::int32_t expert;
  float weight;
};

/// One layer's experts with made-up weights, and who goes where.
struct Problem {
  MadeExperts made{};
  std::int64_t num_tokens = 0;
  std::vector<Assignment> assignments{};  ///< Sorted by (expert, token, k).
  std::vector<float> x{};                 ///< [T, H], as the type has them.
};

inline Problem make_problem(const ExpertConfig& config, DType dtype, std::int64_t num_tokens,
                            std::int32_t top_k, unsigned seed) {
  std::mt19937 random(seed);
  Problem p{.num_tokens = num_tokens};
  p.x = random_floats(num_tokens * config.hidden, random);
  for (float& value : p.x) value = round_to(dtype, value);
  p.made = make_experts(config, dtype, random);
  std::normal_distribution<float> normal;
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
    const auto experts = static_cast<std::size_t>(p.made.config.num_experts);
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

inline std::unique_ptr<ExpertWeights> load(const Problem& p, bool q8 = false,
                                           ThreadPool* pool = nullptr) {
  return load_experts({.config = p.made.config,
                       .source = p.made.source().get(),
                       .dtype = p.made.dtype,
                       .num_local = p.made.config.num_experts,
                       .format = q8 ? WeightFormat::kQ8 : WeightFormat::kExact,
                       .execution = {.pool = pool}});
}

/// The tokens in memory.
struct StoredTokens {
  explicit StoredTokens(const Problem& p)
      : bytes(stored_as(p.made.dtype, p.x)),
        matrix{bytes.data(), p.made.dtype, p.num_tokens, p.made.config.hidden} {}
  std::vector<std::byte> bytes;
  ConstRawMatrix matrix;
};

/// The output row of each assignment, in their order.
inline std::vector<float> run_rows(const Problem& p, const ExpertWeights& weights,
                                   const Layout& layout, ThreadPool* pool = nullptr) {
  TestPlan plan(p, layout);
  const std::int64_t hidden = p.made.config.hidden;
  std::vector<float> rows(static_cast<std::size_t>(plan.rows * hidden),
                          std::numeric_limits<float>::quiet_NaN());
  const StoredTokens x(p);
  experts({.x = x.matrix,
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

inline std::vector<float> run_reduced(const Problem& p, const ExpertWeights& weights,
                                      const Layout& layout, const Subtree& tree,
                                      bool each_group = false, ThreadPool* pool = nullptr) {
  TestPlan plan(p, layout);
  const std::int64_t hidden = p.made.config.hidden;
  const std::int64_t count = p.num_tokens * (each_group ? tree.num_groups : 1);
  std::vector<float> sums(static_cast<std::size_t>(count * hidden),
                          std::numeric_limits<float>::quiet_NaN());
  const StoredTokens x(p);
  experts(
      {.x = x.matrix,
       .plan = plan.view(),
       .layout = layout,
       .weights = &weights,
       .reduced = {.sums = {reinterpret_cast<std::byte*>(sums.data()), DType::kF32, count, hidden},
                   .subtree = tree,
                   .each_group = each_group},
       .execution = {.pool = pool}});
  return sums;
}

/// Each test runs once per instruction set that this machine has.
class Experts : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_isa(GetParam()); }
  void TearDown() override { force_isa(std::nullopt); }
};

inline constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
inline constexpr Layout kLayouts[] = {
    {LayoutKind::kCompact, 1}, {LayoutKind::kAligned, 8}, {LayoutKind::kPadded, 1}};

}  // namespace switchyard::test
