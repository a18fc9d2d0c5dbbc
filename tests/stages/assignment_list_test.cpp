#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "switchyard/combine.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/routed.hpp"

// Plan, capacity and combine of lists with any number of experts a token.

namespace switchyard {
namespace {

using test::expect_error;
using Ids = std::vector<std::int32_t>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

constexpr DropPolicy kPolicies[] = {DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs,
                                    DropPolicy::kBpr};

/// A list that owns its memory.
struct List {
  Ids begin{0};
  Ids expert{};
  std::vector<float> weight{};
  std::vector<std::uint8_t> kept{};

  void add(std::int32_t e, float w, std::uint8_t keep = 1) {
    expert.push_back(e);
    weight.push_back(w);
    kept.push_back(keep);
  }
  void end_token() { begin.push_back(static_cast<std::int32_t>(expert.size())); }

  [[nodiscard]] std::int64_t num_tokens() const { return std::ssize(begin) - 1; }
  [[nodiscard]] std::int64_t size() const { return std::ssize(expert); }
  [[nodiscard]] std::int64_t token_of(std::int64_t i) const {
    return std::upper_bound(begin.begin(), begin.end(), i) - begin.begin() - 1;
  }
  [[nodiscard]] AssignmentList view() const {
    return {.token_begin = {begin.data(), {std::ssize(begin)}},
            .expert = {expert.data(), {size()}},
            .weight = {weight.data(), {size()}}};
  }
};

List list_of(const Routed& routed) {
  List list;
  for (std::int64_t t = 0; t < routed.num_tokens; ++t) {
    for (std::int64_t i = t * routed.top_k; i < (t + 1) * routed.top_k; ++i) {
      list.add(routed.expert[index(i)], routed.weight[index(i)], routed.kept[index(i)]);
    }
    list.end_token();
  }
  return list;
}

/// A token with no expert, one with all of them, then any number, repeated and unused ones too.
List made_up(std::int64_t tokens, std::int32_t experts, unsigned seed) {
  std::mt19937 random(seed);
  List list;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto count = t == 0 || t == tokens - 1 ? 0U
                       : t == 1                  ? static_cast<unsigned>(experts)
                                                 : random() % 9U;
    for (unsigned i = 0; i < count; ++i) {
      const auto any = static_cast<std::int32_t>(random() % static_cast<unsigned>(experts + 1)) - 1;
      list.add(t == 1 ? experts - 1 - static_cast<std::int32_t>(i) : any,
               static_cast<float>(random() % 8U) / 8, random() % 5U != 0 ? 1 : 0);
    }
    list.end_token();
  }
  return list;
}

struct Arrays {
  Ids ints{};
  std::vector<float> weights{};
  bool operator==(const Arrays&) const = default;
};

/// What counts of a plan's arrays.
Arrays contents(const PlanView& view) {
  Arrays out;
  const auto append = [&out](Vector<std::int32_t> v, std::int64_t count) {
    out.ints.insert(out.ints.end(), v.data, v.data + count);
  };
  const std::int32_t rows = view.expert_begin[view.num_experts];
  append(view.expert_begin, view.num_experts + 1);
  append(view.expert_rows, view.num_experts);
  append(view.row_token, rows);
  append(view.token_begin, view.num_tokens() + 1);
  append(view.token_row, view.token_begin[view.num_tokens()]);
  out.weights.assign(view.row_weight.data, view.row_weight.data + rows);
  return out;
}

Arrays planned(const AnyAssignments& assignments, const std::vector<std::uint8_t>& kept,
               const Layout& layout, std::int64_t padded, std::int32_t first, std::int32_t count,
               ThreadPool* pool = nullptr) {
  Plan owner;
  plan({.assignments = assignments,
        .kept = {kept.empty() ? nullptr : kept.data(), {std::ssize(kept)}},
        .first_expert = first,
        .layout = layout,
        .padded_rows = padded,
        .plan = owner.reserve(assignments, layout, count, padded),
        .execution = {.pool = pool}});
  return contents(owner.view());
}

TEST(AssignmentList, ADenseRoutingAsAListHasTheSamePlanBitForBit) {
  ThreadPool pool(3);
  unsigned seed = 0;
  for (const auto& [tokens, top_k, experts, first, count] :
       {std::array<std::int32_t, 5>{0, 2, 4, 0, 4},
        {1, 1, 1, 0, 1},
        {9, 3, 5, 1, 3},
        {700, 4, 33, 0, 33},
        {3000, 7, 60, 20, 20}}) {
    const Routed routed(tokens, top_k, experts, ++seed);
    const DenseAssignments dense{.expert = routed.ids(), .weight = routed.weights()};
    const List list = list_of(routed);
    for (const auto& kept : {std::vector<std::uint8_t>{}, routed.kept}) {
      for (const Layout layout :
           {Layout{}, Layout{LayoutKind::kAligned, 16}, Layout{LayoutKind::kPadded}}) {
        const std::int64_t padded = std::int64_t{tokens} * top_k;
        const Arrays want = planned(dense, kept, layout, padded, first, count);
        EXPECT_EQ(planned(list.view(), kept, layout, padded, first, count), want) << tokens;
        EXPECT_EQ(planned(list.view(), kept, layout, padded, first, count, &pool), want) << tokens;
      }
    }
  }
}

TEST(AssignmentList, APlanOfTokensWithNoneAllAndAnyNumberOfExpertsIsThatOfAPlainLoop) {
  constexpr std::int32_t kExperts = 40;
  for (const std::int64_t tokens : {3, 50, 2000}) {
    const List list = made_up(tokens, kExperts, 7);
    Arrays want;
    Ids begin{0}, rows, row_token;
    std::vector<Ids> rows_of(index(tokens));
    for (std::int32_t e = 0; e < kExperts; ++e) {
      for (std::int64_t i = 0; i < list.size(); ++i) {
        if (list.expert[index(i)] != e || list.kept[index(i)] == 0) continue;
        const std::int64_t token = list.token_of(i);
        rows_of[index(token)].push_back(static_cast<std::int32_t>(row_token.size()));
        row_token.push_back(static_cast<std::int32_t>(token));
        want.weights.push_back(list.weight[index(i)]);
      }
      begin.push_back(static_cast<std::int32_t>(row_token.size()));
      rows.push_back(begin[index(e) + 1] - begin[index(e)]);
    }
    Ids token_begin{0}, token_row;
    for (const Ids& mine : rows_of) {
      token_row.insert(token_row.end(), mine.begin(), mine.end());
      token_begin.push_back(static_cast<std::int32_t>(token_row.size()));
    }
    for (const Ids* part : {&begin, &rows, &row_token, &token_begin, &token_row}) {
      want.ints.insert(want.ints.end(), part->begin(), part->end());
    }
    EXPECT_EQ(planned(list.view(), list.kept, {}, 0, 0, kExperts), want) << tokens << " tokens";
  }
}

TEST(AssignmentList, NoAssignmentAtAllIsAPlanWithoutRows) {
  for (const std::int64_t tokens : {0, 5}) {
    List list;
    for (std::int64_t t = 0; t < tokens; ++t) list.end_token();
    const Arrays got = planned(list.view(), {}, {}, 0, 0, 3);
    EXPECT_EQ(got.ints, Ids(index(4 + 3 + tokens + 1), 0));
    EXPECT_TRUE(got.weights.empty());
  }
}

struct Kept {
  std::vector<std::uint8_t> kept{};
  std::vector<std::int64_t> counts{}, counts_kept{};
  bool operator==(const Kept&) const = default;
};

Kept keep(const AnyAssignments& assignments, std::int32_t experts, std::int64_t capacity,
          DropPolicy policy, ThreadPool* pool = nullptr) {
  Kept out{std::vector<std::uint8_t>(index(num_assignments(assignments)), 9),
           std::vector<std::int64_t>(index(experts)), std::vector<std::int64_t>(index(experts))};
  apply_capacity({.assignments = assignments,
                  .num_experts = experts,
                  .capacity = capacity,
                  .policy = policy,
                  .kept = {out.kept.data(), {std::ssize(out.kept)}},
                  .counts = {out.counts.data(), {experts}},
                  .counts_kept = {out.counts_kept.data(), {experts}},
                  .execution = {.pool = pool}});
  return out;
}

TEST(AssignmentList, ADenseRoutingAsAListKeepsTheSameUnderEveryPolicy) {
  const Routed routed(900, 5, 17, 3);
  const DenseAssignments dense{.expert = routed.ids(), .weight = routed.weights()};
  const List list = list_of(routed);
  ThreadPool pool(3);
  for (const DropPolicy policy : kPolicies) {
    for (const std::int64_t capacity : {0, 1, 100, 10000}) {
      const Kept want = keep(dense, 17, capacity, policy);
      EXPECT_EQ(keep(list.view(), 17, capacity, policy), want);
      EXPECT_EQ(keep(list.view(), 17, capacity, policy, &pool), want);
    }
  }
}

/// Whether assignment i comes before j in the order of the policy.
bool is_before(const List& list, DropPolicy policy, std::int64_t i, std::int64_t j) {
  const auto token = [&](std::int64_t a) { return list.token_of(a); };
  const auto choice = [&](std::int64_t a) { return a - list.begin[index(token(a))]; };
  const auto score = [&](std::int64_t a) {
    float best = -1;
    for (std::int32_t b = list.begin[index(token(a))]; b < list.begin[index(token(a)) + 1]; ++b) {
      if (list.expert[index(b)] >= 0) best = std::max(best, list.weight[index(b)]);
    }
    return best;
  };
  const auto key = [&](std::int64_t a) {
    switch (policy) {
      case DropPolicy::kReroute:
      case DropPolicy::kToken: return std::tuple{0.0F, std::int64_t{0}, a};
      case DropPolicy::kChoice: return std::tuple{0.0F, choice(a), a};
      case DropPolicy::kProbs: return std::tuple{-list.weight[index(a)], std::int64_t{0}, a};
      case DropPolicy::kBpr: return std::tuple{static_cast<float>(choice(a)), std::int64_t{0}, a};
    }
    return std::tuple{0.0F, std::int64_t{0}, a};
  };
  if (policy == DropPolicy::kBpr && choice(i) == choice(j) && score(i) != score(j)) {
    return score(i) > score(j);
  }
  return key(i) < key(j);
}

TEST(AssignmentList, EveryPolicyKeepsTheFirstOfItsOrderWhateverTheTokensHave) {
  constexpr std::int32_t kExperts = 6;
  const List list = made_up(60, kExperts, 11);
  for (const DropPolicy policy : kPolicies) {
    for (const std::int64_t capacity : {1, 7, 20}) {
      const Kept got = keep(list.view(), kExperts, capacity, policy);
      for (std::int64_t i = 0; i < list.size(); ++i) {
        const std::int32_t e = list.expert[index(i)];
        std::int64_t ahead = 0;
        for (std::int64_t j = 0; j < list.size(); ++j) {
          if (list.expert[index(j)] == e && is_before(list, policy, j, i)) ++ahead;
        }
        ASSERT_EQ(got.kept[index(i)], e >= 0 && ahead < capacity ? 1 : 0)
            << "policy " << static_cast<int>(policy) << " assignment " << i;
      }
    }
  }
}

TEST(AssignmentList, SumsByItsPlanAreTheTokensRowsInAscendingOrderOfTheExperts) {
  constexpr std::int32_t kExperts = 12;
  constexpr std::int64_t kHidden = 5;
  const List list = made_up(40, kExperts, 5);
  Plan owner;
  const PlanView view = owner.reserve(list.view(), {}, kExperts, 0);
  plan({.assignments = list.view(), .plan = view});
  const std::int64_t num_rows = view.expert_begin[kExperts];
  const auto y = [](std::int64_t t, std::int32_t e, std::int64_t h) {
    return std::sin(static_cast<float>(t * 13 + e * 7 + h * 3));
  };
  std::vector<float> rows(index(num_rows * kHidden));
  for (std::int32_t e = 0; e < kExperts; ++e) {
    for (std::int32_t r = view.expert_begin[e]; r < view.expert_begin[e + 1]; ++r) {
      for (std::int64_t h = 0; h < kHidden; ++h) {
        rows[index(r * kHidden + h)] = y(view.row_token[r], e, h);
      }
    }
  }
  std::vector<float> sums(index(list.num_tokens() * kHidden), std::nanf(""));
  combine(
      {.rows = {reinterpret_cast<const std::byte*>(rows.data()), DType::kF32, num_rows, kHidden},
       .plan = view,
       .reduced = {.sums = {reinterpret_cast<std::byte*>(sums.data()), DType::kF32,
                            list.num_tokens(), kHidden},
                   .subtree = {.order = {.num_experts = kExperts, .groups = 1}, .num_groups = 1}}});
  for (std::int64_t t = 0; t < list.num_tokens(); ++t) {
    for (std::int64_t h = 0; h < kHidden; ++h) {
      float want = 0.0F;
      for (std::int32_t e = 0; e < kExperts; ++e) {
        for (std::int32_t i = list.begin[index(t)]; i < list.begin[index(t) + 1]; ++i) {
          if (list.expert[index(i)] == e) want = std::fma(list.weight[index(i)], y(t, e, h), want);
        }
      }
      ASSERT_EQ(sums[index(t * kHidden + h)], want) << t << " " << h;
    }
  }
}

TEST(AssignmentList, WhatIsWrongWithAListIsNamed) {
  List list;
  for (const std::int32_t e : {0, 2, 1}) list.add(e, 0.5F);
  list.end_token();
  list.end_token();
  list.add(3, 0.5F);
  list.end_token();
  Plan owner;
  PlanArgs args{
      .assignments = list.view(), .total_experts = 4, .plan = owner.reserve(list.view(), {}, 4, 0)};
  const auto refused = [&args](const std::string& words) {
    expect_error(ErrorCode::kInvalidArgument, words, [&args] { plan(args); });
  };
  EXPECT_NO_THROW(plan(args));
  list.expert[3] = 4;
  refused("expert[2, 0]=4 is not in -1 to 3");
  expect_error(ErrorCode::kInvalidArgument, "expert[2, 0]=4",
               [&] { (void)keep(list.view(), 4, 1, DropPolicy::kToken); });
  list.expert[3] = 3;
  list.begin[0] = 1;
  refused("token_begin[0]=1, want 0");
  list.begin = {0, 3, 2, 4};
  refused("token_begin[2]=2 is less than 3 before it");
  list.begin = {0, 3, 3, 5};
  refused("token_begin[3]=5, want the 4 assignments");
  args.plan.token_row.shape[0] = 2;
  list.begin = {0, 3, 3, 4};
  refused("token_row has room for 2");
  auto& view = std::get<AssignmentList>(args.assignments);
  view.weight.shape[0] = 3;
  refused("weight is [3], want [4]");
  view = {.expert = view.expert, .weight = {list.weight.data(), {4}}};
  refused("token_begin of the assignments is empty");
}

}  // namespace
}  // namespace switchyard
