// Plan and capacity of lists with any number of experts a token on a GPU: the bits of the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "plan/implementations.hpp"
#include "switchyard/plan.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/stage_support.hpp"

namespace switchyard {
namespace {

/// So many tokens with 0 to `most` experts each, on the host and on the device.
struct List {
  std::vector<std::int32_t> begin{0};
  Routed routed;
  DeviceArray<std::int32_t> device_begin, device_expert;
  DeviceArray<float> device_weight;
  DeviceArray<std::uint8_t> device_kept;

  List(std::int64_t tokens, unsigned most, std::int32_t experts, unsigned seed)
      : begin(begins(tokens, most, seed)),
        routed(begin.back(), 1, experts, seed),
        device_begin(begin),
        device_expert(routed.expert),
        device_weight(routed.weight),
        device_kept(routed.kept) {}

  [[nodiscard]] std::int64_t size() const { return begin.back(); }
  [[nodiscard]] AssignmentList host() const {
    return {.token_begin = {begin.data(), {std::ssize(begin)}},
            .expert = {routed.expert.data(), {size()}},
            .weight = {routed.weight.data(), {size()}}};
  }
  [[nodiscard]] AssignmentList device() const {
    return {.token_begin = device_begin.vector(),
            .expert = device_expert.vector(),
            .weight = device_weight.vector()};
  }

 private:
  static std::vector<std::int32_t> begins(std::int64_t tokens, unsigned most, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::int32_t> begin{0};
    for (std::int64_t t = 0; t < tokens; ++t) {
      begin.push_back(begin.back() + static_cast<std::int32_t>(random() % (most + 1)));
    }
    return begin;
  }
};

/// Workspace of the plan of a list.
struct Context {
  DeviceArray<std::byte> workspace;
  DeviceArray<DeviceStatus> status{std::vector<DeviceStatus>(1)};

  Context(std::int64_t size, std::int32_t experts)
      : workspace(
            std::vector<std::byte>(index(std::max(plan_list_workspace_bytes(size, experts),
                                                  capacity_workspace_bytes(size, 1, experts))))) {}
  [[nodiscard]] Execution execution() const {
    return {.backend = Backend::kCuda,
            .workspace = workspace.data(),
            .workspace_bytes = workspace.vector().shape[0],
            .status = status.data()};
  }
};

TEST(ListCuda, ItsPlanIsThatOfTheCpuBitForBitInEveryLayout) {
  const struct {
    std::int64_t tokens;
    unsigned most;
    std::int32_t experts, first, count;
  } cases[] = {{0, 0, 4, 0, 4},          {5, 0, 4, 0, 4},      {1, 8, 8, 0, 8},
               {7, 6, 5, 2, 2},          {300, 9, 40, 3, 30},  {4096, 16, 256, 0, 256},
               {9, 1024, 1024, 0, 1024}, {30000, 3, 31, 0, 31}};
  unsigned seed = 0;
  for (const auto& c : cases) {
    const List list(c.tokens, c.most, c.experts, ++seed);
    const Context context(list.size(), c.count);
    for (const bool masked : {false, true}) {
      for (const auto& [layout, padded] : {std::pair{Layout{}, std::int64_t{0}},
                                           {Layout{LayoutKind::kAligned, 16}, 0},
                                           {Layout{LayoutKind::kPadded}, list.size()}}) {
        Plan owner;
        PlanArgs args{.assignments = list.host(),
                      .first_expert = c.first,
                      .total_experts = c.experts,
                      .layout = layout,
                      .padded_rows = padded,
                      .plan = owner.reserve(list.host(), layout, c.count, padded)};
        if (masked) args.kept = {list.routed.kept.data(), {list.size()}};
        plan(args);
        const std::int64_t of_each = c.tokens == 0 ? 0 : list.size() / c.tokens + 1;
        const PlanOnDevice device(c.tokens, of_each, c.count,
                                  max_rows(layout, list.host(), c.count, padded));
        args.assignments = list.device();
        if (masked) args.kept = list.device_kept.vector();
        args.plan = device.view_of_list();
        args.execution = context.execution();
        for (int again = 0; again < 2; ++again) {
          plan(args);
          ASSERT_EQ(device.contents(), contents(owner.view())) << c.tokens << " " << again;
        }
      }
    }
    EXPECT_TRUE(context.status.get()[0].ok());
  }
}

TEST(ListCuda, BrokenBeginsAreCountedAndLeaveRowsAndTokensThatExist) {
  List list(40, 6, 8, 3);
  std::vector<std::int32_t> begin = list.begin;
  begin[20] = begin[30];
  begin[7] = -5;
  begin[40] = 1 << 30;
  list.device_begin.set(begin);
  const Context context(list.size(), 8);
  const PlanOnDevice device(40, 7, 8, list.size());
  const PlanArgs args{.assignments = list.device(),
                      .plan = device.view_of_list(),
                      .execution = context.execution()};
  plan(args);
  EXPECT_GT(context.status.get()[0].bad_ids, 0U);
  Plan owner;
  PlanView view = owner.reserve(40, 7, 8, list.size());
  const auto fetch = [](auto to, const auto& from) {
    SWITCHYARD_CUDA(cudaMemcpy(to.data, from.data, 4 * index(from.shape[0]), cudaMemcpyDefault));
  };
  fetch(view.token_begin, device.view().token_begin);
  fetch(view.row_token, device.view().row_token);
  fetch(view.token_row, device.view().token_row);
  fetch(view.expert_begin, device.view().expert_begin);
  for (std::int64_t t = 0; t <= 40; ++t) {
    EXPECT_GE(view.token_begin[t], 0);
    EXPECT_LE(view.token_begin[t], view.expert_begin[8]);
  }
  for (std::int32_t r = 0; r < view.expert_begin[8]; ++r) {
    EXPECT_TRUE(view.row_token[r] >= 0 && view.row_token[r] < 40) << r;
    EXPECT_TRUE(view.token_row[r] >= 0 && view.token_row[r] < view.expert_begin[8]) << r;
  }
}

TEST(ListCuda, KeepsWhatTheCpuKeepsByTokenAndByWeightAndRefusesOrdersOfChoices) {
  const List list(3000, 9, 60, 5);
  const Context context(list.size(), 60);
  for (const DropPolicy policy :
       {DropPolicy::kToken, DropPolicy::kProbs, DropPolicy::kChoice, DropPolicy::kBpr}) {
    for (const std::int64_t capacity : {0, 1, 100}) {
      std::vector<std::uint8_t> kept(index(list.size()));
      std::vector<std::int64_t> counts(60), counts_kept(60);
      CapacityArgs args{.assignments = list.host(),
                        .num_experts = 60,
                        .capacity = capacity,
                        .policy = policy,
                        .kept = {kept.data(), {list.size()}},
                        .counts = {counts.data(), {60}},
                        .counts_kept = {counts_kept.data(), {60}}};
      apply_capacity(args);
      const DeviceArray<std::uint8_t> device_kept(kept.size());
      const DeviceArray<std::int64_t> device_counts(60), device_counts_kept(60);
      args.assignments = list.device();
      args.kept = device_kept.vector();
      args.counts = device_counts.vector();
      args.counts_kept = device_counts_kept.vector();
      args.execution = context.execution();
      const bool by_choice = policy == DropPolicy::kChoice || policy == DropPolicy::kBpr;
      if (by_choice && capacity > 0) {
        test::expect_error(ErrorCode::kUnsupported, "order of choices",
                           [&] { apply_capacity(args); });
        continue;
      }
      apply_capacity(args);
      ASSERT_EQ(device_kept.get(), kept);
      ASSERT_EQ(device_counts.get(), counts);
      ASSERT_EQ(device_counts_kept.get(), counts_kept);
    }
  }
}

TEST(ListCuda, APlanThatSaysHowManyRowsATokenHasIsRefused) {
  const List list(40, 6, 8, 3);
  const Context context(list.size(), 8);
  const PlanOnDevice device(40, 7, 8, list.size());
  test::expect_error(ErrorCode::kInvalidArgument, "most_rows", [&] {
    plan({.assignments = list.device(), .plan = device.view(), .execution = context.execution()});
  });
}

}  // namespace
}  // namespace switchyard
