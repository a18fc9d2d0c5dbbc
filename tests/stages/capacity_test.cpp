#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "switchyard/plan.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/routed.hpp"

namespace switchyard {
namespace {

using test::expect_error;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

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
      {.assignments = DenseAssignments{.expert = routed.ids(), .weight = routed.weights()},
       .top_score = {top_score.empty() ? nullptr : top_score.data(), {std::ssize(top_score)}},
       .num_experts = routed.num_experts,
       .capacity = capacity,
       .policy = policy,
       .kept = {out.kept.data(), {routed.num_tokens * routed.top_k}},
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
    expect_error(ErrorCode::kInvalidArgument,
                 "capacity_factor=", [&] { (void)capacity_of(factor, 8, 2, 4); });
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
      expect_error(ErrorCode::kInvalidArgument, "expert[3, 1]=" + std::to_string(id),
                   [&] { keep(routed, 1, policy); });
    }
  }
}

}  // namespace
}  // namespace switchyard
