// Pack, combine and finish on a GPU: the bytes of the CPU.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "combine/gpu/bulk.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/half.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/pack.hpp"
#include "testkit/chosen.hpp"
#include "testkit/gpu/stage_support.hpp"

namespace switchyard {
namespace {

struct Rows {
  std::int64_t num_tokens, top_k, hidden;
  DType dtype;
  Layout layout;
  Plan owner{};
  PlanView host{};
  std::int64_t rows = 0;

  Rows(std::int64_t t, std::int64_t k, std::int64_t h, std::int32_t experts, DType type,
       const Layout& how, unsigned seed)
      : num_tokens(t), top_k(k), hidden(h), dtype(type), layout(how) {
    const Routed routed(t, k, experts, seed);
    rows = max_rows(layout, t, k, experts, t * k);
    host = owner.reserve(t, k, experts, rows);
    plan({.assignments = DenseAssignments{.expert = routed.ids(), .weight = routed.weights()},
          .layout = layout,
          .padded_rows = t * k,
          .plan = host});
  }

  [[nodiscard]] std::vector<std::byte> random(std::int64_t count, unsigned seed) const {
    return stored_as(dtype, random_floats(count, seed));
  }
};

TEST(PackCuda, GivesTheBytesOfTheCpuInEveryLayout) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Layout& layout :
         {Layout{}, Layout{LayoutKind::kAligned, 16}, Layout{LayoutKind::kPadded}}) {
      for (const auto& [tokens, top_k, hidden, experts] : {std::array<std::int32_t, 4>{1, 1, 8, 1},
                                                           {50, 4, 1032, 9},
                                                           {300, 2, 520, 16},
                                                           {40, 40, 16, 6}}) {
        const Rows r(tokens, top_k, hidden, experts, dtype, layout, 3);
        const std::vector<std::byte> x = r.random(tokens * hidden, 4);
        std::vector<std::byte> packed(index(r.rows * hidden * size_of(dtype)), std::byte{0xff});
        PackArgs args{.x = {x.data(), dtype, tokens, hidden},
                      .plan = r.host,
                      .rows = {packed.data(), dtype, r.rows, hidden}};
        pack(args);
        const PlanOnDevice device(r.host);
        const DeviceArray<std::byte> device_x(x), device_rows(packed.size());
        args.x.data = device_x.bytes();
        args.rows.data = device_rows.bytes();
        args.plan = device.view();
        args.execution.backend = Backend::kCuda;
        pack(args);
        EXPECT_EQ(device_rows.get(), packed) << tokens << " " << hidden;
      }
    }
  }
}

/// Tokens, top_k, hidden, experts, groups.
using CombineShape = std::array<std::int32_t, 5>;

enum class Combined : std::uint8_t { kSums, kEachGroup, kSumsAndMore };

/// Returns the name of the GPU's implementation. Of what is added, every third number is -0.
std::string expect_combined_as_on_the_cpu(const CombineShape& shape, DType dtype, DType sums,
                                          Combined what, unsigned seed) {
  const bool each_group = what == Combined::kEachGroup;
  const auto& [tokens, top_k, hidden, experts, groups] = shape;
  const Rows r(tokens, top_k, hidden, experts, dtype, {}, seed);
  const std::vector<std::byte> y = r.random(r.rows * hidden, seed);
  const std::int64_t out_rows = std::int64_t{tokens} * (each_group ? groups : 1);
  std::vector<std::byte> out(index(out_rows * hidden * size_of(sums)), std::byte{0xff});
  CombineArgs args{.rows = {y.data(), dtype, r.rows, hidden},
                   .plan = r.host,
                   .reduced = {.sums = {out.data(), sums, out_rows, hidden},
                               .subtree = {.order = {.num_experts = experts, .groups = groups},
                                           .num_groups = groups},
                               .each_group = each_group}};
  std::vector<float> added = random_floats(std::int64_t{tokens} * hidden, seed);
  for (std::size_t i = 0; i < added.size(); i += 3) added[i] = -0.0F;
  if (what == Combined::kSumsAndMore) args.added = {added.data(), {tokens, hidden}};
  combine(args);
  const PlanOnDevice device(r.host);
  const DeviceArray<std::byte> device_y(y), device_out(out.size());
  const DeviceArray<float> device_added(added);
  if (what == Combined::kSumsAndMore) args.added.data = device_added.data();
  args.rows.data = device_y.bytes();
  args.reduced.sums.data = device_out.bytes();
  args.plan = device.view();
  test::Chosen chosen;
  args.execution = {.backend = Backend::kCuda, .recorder = &chosen};
  combine(args);
  EXPECT_TRUE(device_out.get() == out)
      << tokens << " " << hidden << " groups " << groups << " each " << each_group;
  std::string name = chosen.name;
  // The same where nobody says how many rows a token has.
  device_out.fill(0xff);
  args.plan = device.view_of_list();
  combine(args);
  EXPECT_EQ(chosen.name, "cuda.any");
  EXPECT_TRUE(device_out.get() == out)
      << "any " << tokens << " " << hidden << " groups " << groups << " each " << each_group;
  return name;
}

TEST(CombineCuda, GivesTheBitsOfTheCpu) {
  unsigned seed = 10;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType sums : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const CombineShape& shape : {CombineShape{1, 1, 8, 1, 1},
                                        {50, 4, 1032, 20, 8},
                                        {300, 2, 264, 16, 8},
                                        {20, 40, 16, 50, 8},
                                        {33, 8, 520, 64, 64},
                                        {9, 6, 32, 7, 5},
                                        {40, 8, 512, 256, 8}}) {
        for (const Combined what :
             {Combined::kSums, Combined::kEachGroup, Combined::kSumsAndMore}) {
          (void)expect_combined_as_on_the_cpu(shape, dtype, sums, what, ++seed);
        }
      }
    }
  }
}

TEST(CombineCuda, ManyTokensOfManyRowsGiveTheBitsOfTheCpu) {
  const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
  unsigned seed = 70;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const DType sums : {dtype, DType::kF32}) {
      for (const CombineShape& shape : {CombineShape{2500, 8, 1032, 64, 8},
                                        {2048, 16, 264, 256, 8},
                                        {3001, 3, 512, 7, 5},
                                        {2100, 11, 24, 20, 8}}) {
        for (const Combined what : {Combined::kSums, Combined::kSumsAndMore}) {
          EXPECT_EQ(
              expect_combined_as_on_the_cpu(shape, dtype, sums, what, ++seed) == "cuda.bulk-many",
              hopper);
        }
      }
    }
  }
}

TEST(CombineCuda, AListMayHaveATokenOfManyMoreRowsThanTheOthers) {
  constexpr std::int64_t kTokens = 4500, kHidden = 2304;
  constexpr std::int32_t kExperts = 64;
  std::vector<std::int32_t> begin{0}, expert;
  for (std::int32_t t = 0; t < kTokens; ++t) {
    const std::int32_t count = t == 7 ? 600 : t % 3;  // 1 on average: experts come again
    for (std::int32_t i = 0; i < count; ++i) expert.push_back((t + 5 * i) % kExperts);
    begin.push_back(static_cast<std::int32_t>(expert.size()));
  }
  const std::vector<float> weight = random_floats(std::ssize(expert), 3);
  const AssignmentList list{.token_begin = {begin.data(), {kTokens + 1}},
                            .expert = {expert.data(), {std::ssize(expert)}},
                            .weight = {weight.data(), {std::ssize(expert)}}};
  Plan owner;
  const PlanView host = owner.reserve(list, {}, kExperts, 0);
  plan({.assignments = list, .plan = host});
  const std::vector<std::byte> y =
      stored_as(DType::kBF16, random_floats(std::ssize(expert) * kHidden, 4));
  std::vector<std::byte> out(index(kTokens * kHidden * 2));
  CombineArgs args{.rows = {y.data(), DType::kBF16, std::ssize(expert), kHidden},
                   .plan = host,
                   .reduced = {.sums = {out.data(), DType::kBF16, kTokens, kHidden},
                               .subtree = {.order = {.num_experts = kExperts}, .num_groups = 8}}};
  combine(args);
  const PlanOnDevice device(host);
  const DeviceArray<std::byte> device_y(y), device_out(out.size());
  args.rows.data = device_y.bytes();
  args.reduced.sums.data = device_out.bytes();
  args.plan = device.view();
  args.execution.backend = Backend::kCuda;
  combine(args);
  EXPECT_TRUE(device_out.get() == out);
}

TEST(CombineCuda, BulkCopiesTakeLongRowsOfManyTokensThatHaveTwoAtMost) {
  const BulkProblem bulk{.num_tokens = 16384,
                         .rows_per_token = 2,
                         .row_bytes = 8192,
                         .in = DType::kF16,
                         .out = DType::kF16,
                         .hopper = true};
  EXPECT_TRUE(takes_bulk(bulk));
  const auto takes = [&](auto&& change) {
    BulkProblem problem = bulk;
    change(problem);
    return takes_bulk(problem);
  };
  EXPECT_FALSE(takes([](BulkProblem& p) { p.num_tokens = 4095; }));
  EXPECT_FALSE(takes([](BulkProblem& p) { p.rows_per_token = 3; }));
  EXPECT_FALSE(takes([](BulkProblem& p) { p.row_bytes = 4080; }));
  EXPECT_FALSE(takes([](BulkProblem& p) { p.out = DType::kF32; }));
  EXPECT_FALSE(takes([](BulkProblem& p) { p.each_group = true; }));
  EXPECT_FALSE(takes([](BulkProblem& p) { p.hopper = false; }));
}

TEST(CombineCuda, LongRowsOfManyTokensGiveTheBitsOfTheCpu) {
  // On Hopper these go by bulk copies: whole rows, and pieces of them; two groups, one, and many.
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    unsigned seed = 90;
    for (const CombineShape& shape : {CombineShape{4200, 2, 2056, 20, 8},
                                      {4096, 1, 4096, 5, 1},
                                      {4100, 2, 2304, 6, 2},
                                      {4100, 2, 2048, 3, 1}}) {
      (void)expect_combined_as_on_the_cpu(shape, dtype, dtype, Combined::kSums, ++seed);
    }
  }
}

TEST(FinishCuda, GivesTheBitsOfTheCpu) {
  unsigned seed = 50;
  for (const DType wire : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType out_type : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const auto& [tokens, ranks, groups] :
           {std::array<std::int32_t, 3>{9, 8, 1}, {20, 3, 1}, {5, 2, 4}, {7, 1, 8}, {3, 64, 1}}) {
        const std::int64_t hidden = 72;
        const Rows r(1, 1, 8, 1, wire, {}, ++seed);
        const std::vector<std::byte> partials = r.random(tokens * ranks * groups * hidden, seed);
        std::vector<std::int32_t> row;
        for (std::int32_t i = 0; i < tokens * ranks; ++i) row.push_back(i % 3 == 0 ? -1 : i);
        const std::vector<float> shared = random_floats(tokens * hidden, seed);
        std::vector<std::byte> out(index(tokens * hidden * size_of(out_type)));
        FinishArgs args{.partials = {partials.data(), wire, tokens * ranks * groups, hidden},
                        .partial_row = {row.data(), {tokens, ranks}},
                        .groups_per_row = groups,
                        .shared = {shared.data(), {tokens, hidden}},
                        .out = {out.data(), out_type, tokens, hidden}};
        finish(args);
        const DeviceArray<std::byte> device_partials(partials), device_out(out.size());
        const DeviceArray<std::int32_t> device_row(row);
        const DeviceArray<float> device_shared(shared);
        args.partials.data = device_partials.bytes();
        args.partial_row.data = device_row.data();
        args.shared.data = device_shared.data();
        args.out.data = device_out.bytes();
        args.execution.backend = Backend::kCuda;
        finish(args);
        ASSERT_EQ(device_out.get(), out) << tokens << " " << ranks;
      }
    }
  }
}

}  // namespace
}  // namespace switchyard
