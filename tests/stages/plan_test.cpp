#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "switchyard/plan.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/routed.hpp"

namespace switchyard {
namespace {

using test::expect_error;
using Ids = std::vector<std::int32_t>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Planned {
  Plan plan;
  PlanView view;
};

Planned make(const Routed& routed, const Layout& layout, std::int64_t padded_rows,
             std::int32_t first, std::int32_t count, bool masked, ThreadPool* pool = nullptr) {
  Planned out;
  const std::int64_t rows = max_rows(layout, routed.num_tokens, routed.top_k, count, padded_rows);
  out.view = out.plan.reserve(routed.num_tokens, routed.top_k, count, rows);
  std::fill_n(out.view.row_token.data, rows, -77);
  std::fill_n(out.view.row_weight.data, rows, -77.0F);
  plan({.assignments = DenseAssignments{.expert = routed.ids(), .weight = routed.weights()},
        .kept = flat(masked ? routed.mask() : Matrix<const std::uint8_t>{}),
        .first_expert = first,
        .layout = layout,
        .padded_rows = padded_rows,
        .plan = out.view,
        .execution = {.pool = pool}});
  return out;
}

template <typename T>
std::vector<T> values(Vector<T> v, std::int64_t count) {
  return {v.data, v.data + count};
}

/// Every promise of the plan, checked by plain loops over the routing.
void expect_plan(const Routed& routed, const PlanView& view, const Layout& layout,
                 std::int64_t padded_rows, std::int32_t first, bool masked) {
  std::vector<Ids> rows_of(index(routed.num_tokens));
  std::int64_t begin = 0;
  for (std::int32_t e = 0; e < view.num_experts; ++e) {
    ASSERT_EQ(view.expert_begin[e], begin);
    std::int64_t row = begin;
    for (std::int64_t i = 0; i < std::ssize(routed.expert); ++i) {
      if (routed.expert[index(i)] != first + e || (masked && routed.kept[index(i)] == 0)) continue;
      ASSERT_EQ(view.row_token[row], i / routed.top_k);
      ASSERT_EQ(view.row_weight[row], routed.weight[index(i)]);
      rows_of[index(i / routed.top_k)].push_back(static_cast<std::int32_t>(row++));
    }
    ASSERT_EQ(view.expert_rows[e], row - begin);
    switch (layout.kind) {
      case LayoutKind::kCompact: begin = row; break;
      case LayoutKind::kAligned:
        begin = (row + layout.alignment - 1) / layout.alignment * layout.alignment;
        break;
      case LayoutKind::kPadded: begin += padded_rows; break;
    }
    for (; row < begin; ++row) {
      ASSERT_EQ(view.row_token[row], -1);
      ASSERT_EQ(view.row_weight[row], 0.0F);
    }
  }
  ASSERT_EQ(view.expert_begin[view.num_experts], begin);
  std::int32_t next = 0;
  for (std::int64_t t = 0; t < routed.num_tokens; ++t) {
    ASSERT_EQ(view.token_begin[t], next);
    for (const std::int32_t row : rows_of[index(t)]) ASSERT_EQ(view.token_row[next++], row);
  }
  ASSERT_EQ(view.token_begin[routed.num_tokens], next);
}

TEST(Plan, IsAStablePermutationOfTheKeptAssignmentsInEveryLayout) {
  const struct {
    std::int64_t tokens, top_k;
    std::int32_t experts, first, count;
  } cases[] = {{0, 2, 4, 0, 4},   {1, 1, 1, 0, 1},      {1, 8, 8, 0, 8},
               {7, 3, 5, 2, 2},   {7, 3, 5, 5, 0},      {64, 1, 64, 0, 64},
               {300, 4, 9, 3, 6}, {9000, 2, 31, 0, 31}, {500, 16, 16, 8, 8}};
  unsigned seed = 0;
  for (const auto& c : cases) {
    const Routed routed(c.tokens, c.top_k, c.experts, ++seed);
    for (const bool masked : {false, true}) {
      for (const auto& [layout, padded] : {std::pair{Layout{}, std::int64_t{0}},
                                           {Layout{LayoutKind::kAligned, 1}, 0},
                                           {Layout{LayoutKind::kAligned, 16}, 0},
                                           {Layout{LayoutKind::kPadded}, c.tokens * c.top_k}}) {
        const Planned alone = make(routed, layout, padded, c.first, c.count, masked);
        expect_plan(routed, alone.view, layout, padded, c.first, masked);
        ThreadPool pool(3);
        const Planned shared = make(routed, layout, padded, c.first, c.count, masked, &pool);
        expect_plan(routed, shared.view, layout, padded, c.first, masked);
      }
    }
  }
}

TEST(Plan, AllTokensToOneExpertAndRepeatedIdsWithinATokenAreLegal) {
  Routed routed(50, 4, 6, 1);
  routed.expert.assign(200, 3);
  const Planned out = make(routed, {}, 0, 0, 6, false);
  expect_plan(routed, out.view, {}, 0, 0, false);
  EXPECT_EQ(out.view.expert_rows[3], 200);
}

TEST(Plan, GrowsAndReusesItsMemory) {
  Plan owner;
  const PlanView large = owner.reserve(100, 2, 8, 200);
  const PlanView small = owner.reserve(3, 2, 8, 6);
  EXPECT_EQ(small.expert_begin.data, large.expert_begin.data);
  EXPECT_EQ(small.num_tokens(), 3);
  EXPECT_EQ(owner.view().row_token.shape[0], 6);
  EXPECT_EQ(owner.reserve(1000, 4, 16, 4000).token_row.shape[0], 4000);
}

TEST(Plan, MaxRowsIsReachedByTheWorstRoutingAndNeverExceeded) {
  const Layout aligned{LayoutKind::kAligned, 8};
  Routed routed(3, 2, 100, 1);
  routed.expert = {5, 17, 30, 41, 77, 99};
  const Planned out = make(routed, aligned, 0, 0, 100, false);
  EXPECT_EQ(out.view.expert_begin[100], max_rows(aligned, 3, 2, 100, 0));
  EXPECT_EQ(max_rows({}, 3, 2, 100, 0), 6);
  EXPECT_EQ(max_rows({LayoutKind::kPadded}, 3, 2, 100, 4), 400);
}

TEST(Plan, IdsBeyondTheLayersExpertsAreErrorsWhereTheirNumberIsGiven) {
  Routed routed(9, 2, 5, 1);
  routed.expert[7] = 5;
  Plan owner;
  PlanArgs args{.assignments = DenseAssignments{.expert = routed.ids(), .weight = routed.weights()},
                .plan = owner.reserve(9, 2, 5, 18)};
  EXPECT_NO_THROW(plan(args));
  args.total_experts = 6;
  EXPECT_NO_THROW(plan(args));
  args.total_experts = 5;
  expect_error(ErrorCode::kInvalidArgument, "expert[3, 1]=5", [&] { plan(args); });
}

TEST(Plan, TooSmallArraysAndTooManyRowsAreErrors) {
  const Routed routed(10, 2, 1, 3);
  const auto refused = [](const std::string& words, const auto& call) {
    expect_error(ErrorCode::kInvalidArgument, words, call);
  };
  refused("more than padded_rows=3", [&] { make(routed, {LayoutKind::kPadded}, 3, 0, 1, false); });
  Plan owner;
  PlanArgs args{.assignments = DenseAssignments{.expert = routed.ids(), .weight = routed.weights()},
                .plan = owner.reserve(10, 2, 1, 20)};
  EXPECT_NO_THROW(plan(args));
  args.plan.row_token.shape[0] = args.plan.row_weight.shape[0] = 2;
  refused("row_token has room for 2", [&] { plan(args); });
  args.plan = owner.reserve(10, 2, 1, 20);
  args.plan.token_row.shape[0] = 1;
  refused("token_row has room for 1", [&] { plan(args); });
  args.plan = owner.reserve(9, 2, 1, 20);
  refused("token_begin", [&] { plan(args); });
  args.plan = owner.reserve(10, 2, 1, 20);
  args.layout = {LayoutKind::kAligned, 0};
  refused("alignment", [&] { plan(args); });
  args.layout = {};
  std::get<DenseAssignments>(args.assignments).weight.shape = {20, 1};
  refused("weight is [20, 1], want [10, 2]", [&] { plan(args); });
}

}  // namespace
}  // namespace switchyard
