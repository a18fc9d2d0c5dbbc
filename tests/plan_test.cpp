#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "switchyard/error.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

using Ids = std::vector<std::int32_t>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

/// A made-up routing: ids in [-1, E), repeated ones included, skewed to low experts.
struct Routed {
  std::int64_t num_tokens;
  std::int64_t top_k;
  std::int32_t num_experts;
  Ids expert{};
  std::vector<float> weight{};
  std::vector<std::uint8_t> kept{};

  Routed(std::int64_t t, std::int64_t k, std::int32_t e, unsigned seed)
      : num_tokens(t), top_k(k), num_experts(e) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
    for (std::int64_t i = 0; i < t * k; ++i) {
      const float u = uniform(generator);
      expert.push_back(
          uniform(generator) < 0.1F
              ? -1
              : std::min(e - 1, static_cast<std::int32_t>(u * u * static_cast<float>(e))));
      weight.push_back(static_cast<float>(static_cast<int>(uniform(generator) * 8)) / 8);
      kept.push_back(uniform(generator) < 0.8F ? 1 : 0);
    }
  }

  [[nodiscard]] Matrix<const std::int32_t> ids() const {
    return {expert.data(), {num_tokens, top_k}};
  }
  [[nodiscard]] Matrix<const float> weights() const { return {weight.data(), {num_tokens, top_k}}; }
  [[nodiscard]] Matrix<const std::uint8_t> mask() const {
    return {kept.data(), {num_tokens, top_k}};
  }
};

struct Kept {
  std::vector<std::uint8_t> kept;
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> counts_kept;
  bool operator==(const Kept&) const = default;
};

Kept keep(const Routed& routed, std::int64_t capacity, DropPolicy policy,
          const std::vector<float>& top_score = {}, ThreadPool* pool = nullptr) {
  Kept out{std::vector<std::uint8_t>(routed.expert.size(), 9),
           std::vector<std::int64_t>(index(routed.num_experts), -9),
           std::vector<std::int64_t>(index(routed.num_experts), -9)};
  apply_capacity(
      {.expert = routed.ids(),
       .weight = routed.weights(),
       .top_score = {top_score.empty() ? nullptr : top_score.data(), {std::ssize(top_score)}},
       .num_experts = routed.num_experts,
       .capacity = capacity,
       .policy = policy,
       .kept = {out.kept.data(), {routed.num_tokens, routed.top_k}},
       .counts = {out.counts.data(), {routed.num_experts}},
       .counts_kept = {out.counts_kept.data(), {routed.num_experts}},
       .execution = {.pool = pool}});
  return out;
}

constexpr DropPolicy kPolicies[] = {DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs,
                                    DropPolicy::kBpr};

TEST(Capacity, IsTheCeilingWithSlackForRounding) {
  EXPECT_EQ(capacity_of(1.0, 6, 2, 4), 3);
  EXPECT_EQ(capacity_of(1.25, 6, 2, 4), 4);
  EXPECT_EQ(capacity_of(1.1, 100, 1, 10), 11);  // 1.1 * 100 / 10 is a little more than 11
  EXPECT_EQ(capacity_of(0.5, 1, 1, 8), 1);
  EXPECT_EQ(capacity_of(1e-12, 5, 1, 8), 1);  // 0 would mean no limit
  EXPECT_EQ(capacity_of(2.0, 0, 2, 4), 0);
}

TEST(Capacity, FactorsThatAreNotFiniteAndPositiveAreErrors) {
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN(), 1e300}) {
    EXPECT_NE(message_of([&] { (void)capacity_of(factor, 8, 2, 4); }).find("capacity_factor="),
              std::string::npos);
  }
}

TEST(Capacity, EachPolicyKeepsTheFirstOfItsOrder) {
  Routed routed(4, 2, 2, 1);
  routed.expert = {0, 1, 1, 0, 0, 1, 0, -1};
  routed.weight = {0.5F, 0.4F, 0.7F, 0.3F, 0.9F, 0.1F, 0.6F, 0.0F};
  using Mask = std::vector<std::uint8_t>;
  EXPECT_EQ(keep(routed, 2, DropPolicy::kToken).kept, (Mask{1, 1, 1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(keep(routed, 2, DropPolicy::kChoice).kept, (Mask{1, 1, 1, 0, 1, 0, 0, 0}));
  EXPECT_EQ(keep(routed, 2, DropPolicy::kProbs).kept, (Mask{0, 1, 1, 0, 1, 0, 1, 0}));
  // Tokens by largest weight: 2, 1, 3, 0.
  EXPECT_EQ(keep(routed, 2, DropPolicy::kBpr).kept, (Mask{0, 0, 1, 0, 1, 1, 1, 0}));
  // By given scores: 3, 0, 1, 2 (tie of 0 and 1 in token order).
  EXPECT_EQ(keep(routed, 2, DropPolicy::kBpr, {0.5F, 0.5F, 0.1F, 0.9F}).kept,
            (Mask{1, 1, 1, 0, 0, 0, 1, 0}));
}

TEST(Capacity, EqualWeightsAndScoresAreKeptInTokenOrder) {
  Routed routed(6, 1, 1, 1);
  routed.expert.assign(6, 0);
  routed.weight = {0.5F, -0.0F, 0.0F, 0.5F, 0.5F, 0.0F};
  using Mask = std::vector<std::uint8_t>;
  EXPECT_EQ(keep(routed, 4, DropPolicy::kProbs).kept, (Mask{1, 1, 0, 1, 1, 0}));
  EXPECT_EQ(keep(routed, 4, DropPolicy::kBpr).kept, (Mask{1, 1, 0, 1, 1, 0}));
}

TEST(Capacity, KeepsExactlyTheSmallerOfDemandAndCapacityForAnyNumberOfThreads) {
  const Routed routed(5000, 3, 13, 4);
  for (const DropPolicy policy : kPolicies) {
    for (const std::int64_t capacity : {0, 1, 500, 100000}) {
      const Kept out = keep(routed, capacity, policy);
      std::vector<std::int64_t> wanted(13), kept(13);
      for (std::size_t i = 0; i < routed.expert.size(); ++i) {
        const std::int32_t e = routed.expert[i];
        ASSERT_LE(out.kept[i], 1);
        ASSERT_TRUE(e >= 0 || out.kept[i] == 0);
        if (e >= 0) ++wanted[index(e)];
        if (e >= 0 && out.kept[i] == 1) ++kept[index(e)];
      }
      EXPECT_EQ(out.counts, wanted);
      EXPECT_EQ(out.counts_kept, kept);
      for (std::size_t e = 0; e < 13; ++e) {
        EXPECT_EQ(kept[e], capacity == 0 ? wanted[e] : std::min(wanted[e], capacity));
      }
      ThreadPool pool(3);
      EXPECT_EQ(keep(routed, capacity, policy, {}, &pool), out);
    }
  }
}

TEST(Capacity, NoTokenIsFine) {
  for (const DropPolicy policy : kPolicies) {
    EXPECT_EQ(keep(Routed(0, 2, 3, 1), 1, policy).counts, (std::vector<std::int64_t>{0, 0, 0}));
  }
}

TEST(Capacity, IdsOutOfRangeAreErrorsThatNameTheFirst) {
  for (const std::int32_t id : {-2, 5, 1 << 30}) {
    Routed routed(9, 2, 5, 1);
    routed.expert[7] = id;
    routed.expert[12] = id;
    for (const DropPolicy policy : kPolicies) {
      const std::string message = message_of([&] { keep(routed, 1, policy); });
      EXPECT_NE(message.find("expert[3, 1]=" + std::to_string(id)), std::string::npos) << message;
    }
  }
}

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
  plan({.expert = routed.ids(),
        .weight = routed.weights(),
        .kept = masked ? routed.mask() : Matrix<const std::uint8_t>{},
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
  PlanArgs args{
      .expert = routed.ids(), .weight = routed.weights(), .plan = owner.reserve(9, 2, 5, 18)};
  EXPECT_NO_THROW(plan(args));
  args.total_experts = 6;
  EXPECT_NO_THROW(plan(args));
  args.total_experts = 5;
  EXPECT_NE(message_of([&] { plan(args); }).find("expert[3, 1]=5"), std::string::npos);
}

TEST(Plan, TooSmallArraysAndTooManyRowsAreErrors) {
  const Routed routed(10, 2, 1, 3);
  EXPECT_NE(message_of([&] {
              make(routed, {LayoutKind::kPadded}, 3, 0, 1, false);
            }).find("more than padded_rows=3"),
            std::string::npos);
  Plan owner;
  PlanArgs args{
      .expert = routed.ids(), .weight = routed.weights(), .plan = owner.reserve(10, 2, 1, 20)};
  EXPECT_NO_THROW(plan(args));
  args.plan.row_token.shape[0] = args.plan.row_weight.shape[0] = 2;
  EXPECT_NE(message_of([&] { plan(args); }).find("row_token has room for 2"), std::string::npos);
  args.plan = owner.reserve(10, 2, 1, 20);
  args.plan.token_row.shape[0] = 1;
  EXPECT_NE(message_of([&] { plan(args); }).find("token_row has room for 1"), std::string::npos);
  args.plan = owner.reserve(9, 2, 1, 20);
  EXPECT_NE(message_of([&] { plan(args); }).find("token_begin"), std::string::npos);
  args.plan = owner.reserve(10, 2, 1, 20);
  args.layout = {LayoutKind::kAligned, 0};
  EXPECT_NE(message_of([&] { plan(args); }).find("alignment"), std::string::npos);
  args.layout = {};
  args.weight.shape = {20, 1};
  EXPECT_NE(message_of([&] { plan(args); }).find("weight is [20, 1], want [10, 2]"),
            std::string::npos);
}

}  // namespace
}  // namespace switchyard
