// Plan and capacity on a GPU: the bits of the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "plan/gpu/few.hpp"
#include "plan/gpu/tiles.hpp"
#include "switchyard/plan.hpp"
#include "testkit/gpu/stage_support.hpp"

namespace switchyard {
namespace {

TEST(PlanCuda, IsThePlanOfTheCpuBitForBitInEveryLayout) {
  const struct {
    std::int64_t tokens, top_k;
    std::int32_t experts, first, count;
  } cases[] = {{8, 8, 256, 0, 256},       {4, 8, 256, 128, 100},   {2, 32, 1024, 0, 1024},
               {21, 3, 2, 0, 2},          {0, 2, 4, 0, 4},         {1, 1, 1, 0, 1},
               {1, 8, 8, 0, 8},           {7, 3, 5, 2, 2},         {64, 1, 64, 0, 64},
               {300, 4, 9, 3, 6},         {9000, 2, 31, 0, 31},    {500, 16, 16, 8, 8},
               {4096, 8, 256, 0, 256},    {16384, 2, 128, 0, 128}, {200000, 8, 128, 64, 64},
               {3000, 32, 1024, 0, 1024}, {700, 3, 5, 5, 0},       {513, 2, 255, 0, 255},
               {8191, 8, 256, 0, 256},    {2049, 32, 129, 0, 129}, {40000, 1, 100, 9, 90},
               {1500, 4, 3, 1, 1},        {3000, 16, 7, 7, 0}};
  unsigned seed = 0;
  for (const auto& c : cases) {
    const Routed routed(c.tokens, c.top_k, c.experts, ++seed);
    const DeviceArray<std::int32_t> expert(routed.expert);
    const DeviceArray<float> weight(routed.weight);
    const DeviceArray<std::uint8_t> kept(routed.kept);
    const StageContext context(c.tokens, c.top_k, c.experts, 8);
    for (const bool masked : {false, true}) {
      for (const auto& [layout, padded] :
           {std::pair{Layout{}, std::int64_t{0}},
            {Layout{LayoutKind::kAligned, 16}, 0},
            {Layout{LayoutKind::kPadded}, std::min<std::int64_t>(c.tokens * c.top_k, 60000)}}) {
        Plan owner;
        const std::int64_t rows = max_rows(layout, c.tokens, c.top_k, c.count, padded);
        PlanArgs args{
            .assignments = DenseAssignments{.expert = routed.ids(), .weight = routed.weights()},
            .first_expert = c.first,
            .total_experts = c.experts,
            .layout = layout,
            .padded_rows = padded,
            .plan = owner.reserve(c.tokens, c.top_k, c.count, rows)};
        if (masked) args.kept = flat(routed.mask());
        try {
          plan(args);
        } catch (const Error&) {
          continue;  // more rows than padded_rows: another test
        }
        const PlanOnDevice device(c.tokens, c.top_k, c.count, rows);
        auto& dense = std::get<DenseAssignments>(args.assignments);
        dense.expert.data = expert.data();
        dense.weight.data = weight.data();
        if (masked) args.kept.data = kept.data();
        args.plan = device.view();
        args.execution = context.execution();
        plan(args);
        ASSERT_EQ(device.contents(), contents(owner.view())) << c.tokens << " " << c.experts;
        plan(args);
        ASSERT_EQ(device.contents(), contents(owner.view())) << "again";
      }
    }
    EXPECT_TRUE(context.status().ok());
  }
}

TEST(PlanCuda, PlansOfAllSizesInTurnLeaveTheWorkspaceUsable) {
  const struct {
    std::int64_t tokens, top_k;
    std::int32_t experts;
  } cases[] = {{4096, 8, 256}, {300, 4, 128}, {8191, 8, 200}, {7, 8, 256},
               {4096, 8, 64},  {513, 2, 256}, {9000, 3, 100}, {2048, 8, 256}};
  const StageContext context(9000, 8, 256, 8);
  for (unsigned round = 0; round < 6; ++round) {
    for (const auto& c : cases) {
      const Routed routed(c.tokens, c.top_k, c.experts, round);
      Plan owner;
      const std::int64_t rows = c.tokens * c.top_k;
      PlanArgs args{
          .assignments = DenseAssignments{.expert = routed.ids(), .weight = routed.weights()},
          .plan = owner.reserve(c.tokens, c.top_k, c.experts, rows)};
      plan(args);
      const DeviceArray<std::int32_t> expert(routed.expert);
      const DeviceArray<float> weight(routed.weight);
      const PlanOnDevice device(c.tokens, c.top_k, c.experts, rows);
      auto& dense = std::get<DenseAssignments>(args.assignments);
      dense.expert.data = expert.data();
      dense.weight.data = weight.data();
      args.plan = device.view();
      args.execution = context.execution();
      for (unsigned again = 0; again <= round % 3; ++again) plan(args);
      ASSERT_EQ(device.contents(), contents(owner.view())) << c.tokens << " " << c.experts;
    }
  }
}

TEST(PlanCuda, TokensThatFitWarpsAndBlocksThatFitTheDeviceGoByTiles) {
  EXPECT_TRUE(planning::are_tiles(4096, 8, 256, 132));
  EXPECT_TRUE(planning::are_tiles(65535, 1, 1, 132));
  EXPECT_FALSE(planning::are_tiles(8192, 8, 256, 132));  // a sum of 17 bits
  EXPECT_FALSE(planning::are_tiles(4096, 8, 256, 63));
  EXPECT_FALSE(planning::are_tiles(64, 8, 256, 132));  // one block
  EXPECT_FALSE(planning::are_tiles(4096, 6, 256, 132));
  EXPECT_FALSE(planning::are_tiles(100, 64, 256, 132));
  EXPECT_FALSE(planning::are_tiles(4096, 8, 257, 132));
  EXPECT_FALSE(planning::are_tiles(4096, 8, 0, 132));
}

TEST(PlanCuda, UpTo64AssignmentsOfACompactLayoutAreCompared) {
  EXPECT_TRUE(planning::are_few(8, 8, true));
  EXPECT_FALSE(planning::are_few(65, 1, true));
  EXPECT_FALSE(planning::are_few(8, 8, false));
  EXPECT_FALSE(planning::are_few(0, 8, true));
}

TEST(PlanCuda, BadIdsAndRowsBeyondThePaddingAreSkippedAndCounted) {
  Routed routed(20, 2, 4, 1);
  routed.expert.assign(40, 0);
  routed.expert[5] = 7;
  routed.expert[6] = -3;
  routed.expert[7] = 1 << 30;
  const DeviceArray<std::int32_t> expert(routed.expert);
  const DeviceArray<float> weight(routed.weight);
  const StageContext context(20, 2, 4, 8);
  const PlanOnDevice device(20, 2, 4, 40);
  plan({.assignments =
            DenseAssignments{.expert = expert.matrix(20, 2), .weight = weight.matrix(20, 2)},
        .total_experts = 4,
        .layout = {LayoutKind::kPadded},
        .padded_rows = 10,
        .plan = device.view(),
        .execution = context.execution()});
  EXPECT_EQ(context.status().bad_ids, 3U);
  EXPECT_EQ(context.status().lost_rows, 27U);
  const std::vector<std::int32_t> all = device.contents();
  EXPECT_EQ(std::vector<std::int32_t>(all.begin(), all.begin() + 9),
            (std::vector<std::int32_t>{0, 10, 20, 30, 40, 10, 0, 0, 0}));
}

TEST(PlanCuda, BadIdsAmongAFewAreSkippedAndCounted) {
  Routed routed(4, 2, 4, 1);
  routed.expert = {3, 7, -1, 0, 1 << 30, 3, -3, 0};
  const DeviceArray<std::int32_t> expert(routed.expert);
  const DeviceArray<float> weight(routed.weight);
  const StageContext context(4, 2, 4, 8);
  const PlanOnDevice device(4, 2, 4, 8);
  plan({.assignments =
            DenseAssignments{.expert = expert.matrix(4, 2), .weight = weight.matrix(4, 2)},
        .total_experts = 4,
        .plan = device.view(),
        .execution = context.execution()});
  EXPECT_EQ(context.status().bad_ids, 3U);
  const std::vector<std::int32_t> all = device.contents();
  EXPECT_EQ(std::vector<std::int32_t>(all.begin(), all.begin() + 9),
            (std::vector<std::int32_t>{0, 2, 2, 2, 4, 2, 0, 0, 2}));
}

TEST(CapacityCuda, KeepsWhatTheCpuKeepsUnderEveryPolicy) {
  unsigned seed = 0;
  for (const auto& [tokens, top_k, experts] : {std::array<std::int32_t, 3>{1, 1, 1},
                                               {7, 3, 5},
                                               {4096, 8, 256},
                                               {30000, 2, 128},
                                               {100000, 4, 17},
                                               {513, 8, 1024},
                                               {0, 2, 4}}) {
    const Routed routed(tokens, top_k, experts, ++seed);
    std::vector<float> score = random_floats(tokens, seed);
    for (float& x : score) x = std::round(4 * x) / 4;
    const DeviceArray<std::int32_t> expert(routed.expert);
    const DeviceArray<float> weight(routed.weight), device_score(score);
    const StageContext context(tokens, top_k, experts, 8);
    for (const DropPolicy policy :
         {DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs, DropPolicy::kBpr}) {
      for (const bool scored : {false, true}) {
        for (const double factor : {0.0, 0.5, 1.0, 4.0}) {
          const std::int64_t picks = tokens * top_k;
          std::vector<std::uint8_t> kept(index(picks));
          std::vector<std::int64_t> counts(index(experts)), counts_kept(index(experts));
          CapacityArgs args{
              .assignments = DenseAssignments{.expert = routed.ids(), .weight = routed.weights()},
              .top_score = {scored ? score.data() : nullptr, {tokens}},
              .num_experts = experts,
              .capacity = factor == 0.0 ? 0 : capacity_of(factor, tokens, top_k, experts),
              .policy = policy,
              .kept = {kept.data(), {tokens * top_k}},
              .counts = {counts.data(), {experts}},
              .counts_kept = {counts_kept.data(), {experts}}};
          apply_capacity(args);
          const DeviceArray<std::uint8_t> device_kept(kept.size());
          const DeviceArray<std::int64_t> device_counts(counts.size());
          const DeviceArray<std::int64_t> device_counts_kept(counts.size());
          auto& dense = std::get<DenseAssignments>(args.assignments);
          dense.expert.data = expert.data();
          dense.weight.data = weight.data();
          if (scored) args.top_score.data = device_score.data();
          args.kept = device_kept.vector();
          args.counts = device_counts.vector();
          args.counts_kept = device_counts_kept.vector();
          args.execution = context.execution();
          apply_capacity(args);
          ASSERT_EQ(device_kept.get(), kept) << tokens << " policy " << static_cast<int>(policy);
          ASSERT_EQ(device_counts.get(), counts);
          ASSERT_EQ(device_counts_kept.get(), counts_kept);
        }
      }
    }
    EXPECT_TRUE(context.status().ok());
  }
}

/// A routing, its plan on both sides, and 16-bit or f32 rows.

}  // namespace
}  // namespace switchyard
