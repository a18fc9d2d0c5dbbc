#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "core/half.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/error.hpp"
#include "switchyard/pack.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// A routing and the experts' rows, one row per assignment whatever plan it is packed by.
struct Problem {
  std::int64_t num_tokens, top_k, hidden;
  std::int32_t num_experts;
  DType dtype;
  std::vector<std::int32_t> expert{};
  std::vector<float> weight{};

  Problem(std::int64_t t, std::int64_t k, std::int64_t h, std::int32_t e, DType type,
          unsigned seed = 1)
      : num_tokens(t), top_k(k), hidden(h), num_experts(e), dtype(type) {
    std::mt19937 generator(seed);
    for (std::int64_t i = 0; i < t * k; ++i) {
      expert.push_back(static_cast<std::int32_t>(generator() % (static_cast<unsigned>(e) + 1)) - 1);
      weight.push_back(static_cast<float>(generator() % 1000) / 777 - 0.3F);
    }
  }

  /// What expert e gives for token t in column h (before rounding to dtype).
  [[nodiscard]] float y(std::int64_t t, std::int32_t e, std::int64_t h) const {
    return round_to(dtype, std::sin(static_cast<float>(t * 13 + e * 7 + h * 3)));
  }
};

struct Reduced {
  std::vector<std::byte> bytes;
  bool operator==(const Reduced&) const = default;
};

/// Plan, fill the rows (padding: NaN), combine.
Reduced run(const Problem& p, const Layout& layout, const Subtree& subtree, DType sums,
            bool each_group, std::int32_t first, std::int32_t count, ThreadPool* pool = nullptr,
            Matrix<const float> added = {}) {
  Plan owner;
  const std::int64_t padded = p.num_tokens * p.top_k;
  const std::int64_t rows = max_rows(layout, p.num_tokens, p.top_k, count, padded);
  const PlanView view = owner.reserve(p.num_tokens, p.top_k, count, rows);
  plan({.assignments = DenseAssignments{.expert = {p.expert.data(), {p.num_tokens, p.top_k}},
                                        .weight = {p.weight.data(), {p.num_tokens, p.top_k}}},
        .first_expert = first,
        .layout = layout,
        .padded_rows = padded,
        .plan = view});
  std::vector<std::byte> y(index(rows * p.hidden * size_of(p.dtype)), std::byte{0xff});
  for (std::int32_t e = 0; e < count; ++e) {
    for (std::int64_t r = view.expert_begin[e]; r < view.expert_begin[e] + view.expert_rows[e];
         ++r) {
      for (std::int64_t h = 0; h < p.hidden; ++h) {
        store_float(y.data(), p.dtype, r * p.hidden + h, p.y(view.row_token[r], first + e, h));
      }
    }
  }
  const std::int64_t out_rows = p.num_tokens * (each_group ? subtree.num_groups : 1);
  Reduced out{std::vector<std::byte>(index(out_rows * p.hidden * size_of(sums)), std::byte{0xff})};
  combine({.rows = {y.data(), p.dtype, rows, p.hidden},
           .plan = view,
           .first_expert = first,
           .added = added,
           .reduced = {.sums = {out.bytes.data(), sums, out_rows, p.hidden},
                       .subtree = subtree,
                       .each_group = each_group},
           .execution = {.pool = pool}});
  return out;
}

/// The order of sums, written down again: group g of token t in column h.
float group_sum(const Problem& p, const ReductionOrder& order, std::int32_t g, std::int64_t t,
                std::int64_t h) {
  float acc = 0.0F;
  for (std::int32_t e = order.begin(g); e < order.begin(g + 1); ++e) {
    for (std::int64_t k = 0; k < p.top_k; ++k) {
      const std::size_t i = index(t * p.top_k + k);
      if (p.expert[i] == e) acc = std::fma(p.weight[i], p.y(t, e, h), acc);
    }
  }
  return acc;
}

float tree(std::vector<float> leaves) {
  while (!std::has_single_bit(leaves.size())) leaves.push_back(0.0F);
  while (leaves.size() > 1) {
    for (std::size_t i = 0; i < leaves.size() / 2; ++i)
      leaves[i] = leaves[2 * i] + leaves[2 * i + 1];
    leaves.resize(leaves.size() / 2);
  }
  return leaves[0];
}

TEST(Combine, AddsInTheFixedOrderByBitsInEveryLayout) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType sums : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const auto& [tokens, k, hidden, experts, groups] :
           {std::array<std::int32_t, 5>{9, 4, 300, 20, 8},
            {3, 9, 5, 3, 8},
            {1, 1, 257, 1, 1},
            {5, 6, 17, 13, 5},
            {4, 16, 8, 16, 16}}) {
        const Problem p(tokens, k, hidden, experts, dtype);
        const Subtree whole{.order = {.num_experts = experts, .groups = groups},
                            .num_groups = groups};
        std::vector<float> added(index(std::int64_t{tokens} * hidden));
        for (std::size_t i = 0; i < added.size(); ++i) added[i] = std::cos(static_cast<float>(i));
        for (const Layout& layout :
             {Layout{}, Layout{LayoutKind::kAligned, 8}, Layout{LayoutKind::kPadded}}) {
          const Reduced out = run(p, layout, whole, sums, false, 0, experts);
          const Reduced with_added = run(p, layout, whole, sums, false, 0, experts, nullptr,
                                         {added.data(), {tokens, hidden}});
          for (std::int64_t t = 0; t < tokens; ++t) {
            for (std::int64_t h = 0; h < hidden; ++h) {
              std::vector<float> leaves;
              for (std::int32_t g = 0; g < groups; ++g) {
                leaves.push_back(group_sum(p, whole.order, g, t, h));
              }
              const float got = load_float(out.bytes.data(), sums, t * hidden + h);
              ASSERT_EQ(std::bit_cast<std::uint32_t>(got),
                        std::bit_cast<std::uint32_t>(round_to(sums, tree(leaves))))
                  << t << " " << h;
              const float more = load_float(with_added.bytes.data(), sums, t * hidden + h);
              ASSERT_EQ(std::bit_cast<std::uint32_t>(more),
                        std::bit_cast<std::uint32_t>(
                            round_to(sums, tree(leaves) + added[index(t * hidden + h)])))
                  << t << " " << h;
            }
          }
        }
      }
    }
  }
}

TEST(Combine, ATokenWithoutRowsGetsWhatIsAdded) {
  Problem p(3, 2, 9, 4, DType::kF32);
  p.expert = {-1, -1, 1, 2, -1, -1};
  std::vector<float> added(27, 2.5F);
  added[4] = -0.0F;  // +0 and this are +0
  const Reduced out = run(p, {}, {.order = {.num_experts = 4}}, DType::kF32, false, 0, 4, nullptr,
                          {added.data(), {3, 9}});
  for (const std::int64_t t : {0, 2}) {
    for (std::int64_t h = 0; h < 9; ++h) {
      const float got = load_float(out.bytes.data(), DType::kF32, t * 9 + h);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(got),
                std::bit_cast<std::uint32_t>(0.0F + added[index(t * 9 + h)]));
    }
  }
}

TEST(Combine, EachGroupIsRoundedByItselfAndAbsentOnesAreZero) {
  const Problem p(12, 3, 70, 10, DType::kF32);
  const Subtree part{.order = {.num_experts = 10, .groups = 8}, .first_group = 2, .num_groups = 4};
  const std::int32_t first = part.order.begin(2);
  const Reduced out = run(p, {}, part, DType::kBF16, true, first, part.order.begin(6) - first);
  for (std::int64_t t = 0; t < 12; ++t) {
    for (std::int32_t g = 0; g < 4; ++g) {
      for (std::int64_t h = 0; h < 70; ++h) {
        ASSERT_EQ(load_float(out.bytes.data(), DType::kBF16, (t * 4 + g) * 70 + h),
                  round_to(DType::kBF16, group_sum(p, part.order, g + 2, t, h)));
      }
    }
  }
}

TEST(Combine, TheSameBitsForAnyNumberOfThreads) {
  const Problem p(100, 3, 300, 10, DType::kBF16);
  const Subtree whole{.order = {.num_experts = 10}};
  const Reduced alone = run(p, {}, whole, DType::kBF16, false, 0, 10);
  ThreadPool pool(3);
  EXPECT_EQ(run(p, {}, whole, DType::kBF16, false, 0, 10, &pool), alone);
}

TEST(Combine, NegativeZeroBecomesZeroOnlyBesideAnAbsentGroup) {
  // fma(1e-30, -1e-30, +0) underflows to -0.
  for (const std::int32_t groups : {1, 2}) {
    const std::vector<std::int32_t> expert{0};
    const std::vector<float> weight{1e-30F};
    Plan owner;
    const PlanView view = owner.reserve(1, 1, 2, 1);
    plan({.assignments = DenseAssignments{.expert = {expert.data(), {1, 1}},
                                          .weight = {weight.data(), {1, 1}}},
          .plan = view});
    const float y = -1e-30F;
    float sum = 1.0F;
    combine({.rows = {reinterpret_cast<const std::byte*>(&y), DType::kF32, 1, 1},
             .plan = view,
             .reduced = {.sums = {reinterpret_cast<std::byte*>(&sum), DType::kF32, 1, 1},
                         .subtree = {.order = {.num_experts = 2, .groups = groups},
                                     .num_groups = groups}}});
    EXPECT_EQ(sum, 0.0F);
    EXPECT_EQ(std::signbit(sum), groups == 1);
  }
}

TEST(Combine, OfPackedTokensGivesThemBackWhenWeightsSumToOne) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const Layout& layout :
         {Layout{}, Layout{LayoutKind::kAligned, 64}, Layout{LayoutKind::kPadded}}) {
      constexpr std::int64_t kTokens = 128, kHidden = 64, kExperts = 32;
      std::mt19937 generator(3);
      std::vector<std::int32_t> expert;
      std::vector<float> weight;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        const auto first = static_cast<std::int32_t>(generator() % kExperts);
        const float w = static_cast<float>(generator() % 256) / 256;
        expert.insert(expert.end(), {first, (first + 5) % std::int32_t{kExperts}});
        weight.insert(weight.end(), {w, 1 - w});
      }
      std::vector<std::byte> x(index(kTokens * kHidden * 2));
      for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
        store_float(x.data(), dtype, i, std::sin(static_cast<float>(i)));
      }
      const std::int64_t rows = max_rows(layout, kTokens, 2, kExperts, kTokens);
      Plan owner;
      const PlanView view = owner.reserve(kTokens, 2, kExperts, rows);
      plan({.assignments = DenseAssignments{.expert = {expert.data(), {kTokens, 2}},
                                            .weight = {weight.data(), {kTokens, 2}}},
            .layout = layout,
            .padded_rows = kTokens,
            .plan = view});
      std::vector<std::byte> packed(index(rows * kHidden * 2));
      pack({.x = {x.data(), dtype, kTokens, kHidden},
            .plan = view,
            .rows = {packed.data(), dtype, rows, kHidden}});
      std::vector<float> sums(index(kTokens * kHidden));
      combine({.rows = {packed.data(), dtype, rows, kHidden},
               .plan = view,
               .reduced = {.sums = {reinterpret_cast<std::byte*>(sums.data()), DType::kF32, kTokens,
                                    kHidden},
                           .subtree = {.order = {.num_experts = kExperts}}}});
      for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
        ASSERT_NEAR(sums[index(i)], load_float(x.data(), dtype, i), 1e-3);
      }
    }
  }
}

TEST(Finish, PartsOfAllRanksGiveTheBitsOfOneRank) {
  for (const std::int32_t num_ranks : {1, 2, 4, 8}) {
    for (const std::int32_t num_experts : {16, 20, 3}) {
      const Problem p(20, 5, 130, num_experts, DType::kF32, 7);
      const ReductionOrder order{.num_experts = num_experts};
      const Reduced whole = run(p, {}, {.order = order}, DType::kF32, false, 0, num_experts);
      std::vector<std::byte> partials;
      std::vector<std::int32_t> partial_row(index(20 * num_ranks));
      for (std::int32_t r = 0; r < num_ranks; ++r) {
        const Subtree part = subtree_of_rank(order, r, num_ranks);
        const std::int32_t first = part.order.begin(part.first_group);
        const std::int32_t end = part.order.begin(part.first_group + part.num_groups);
        const Reduced mine = run(p, {}, part, DType::kF32, false, first, end - first);
        partials.insert(partials.end(), mine.bytes.begin(), mine.bytes.end());
        for (std::int32_t t = 0; t < 20; ++t) {
          bool any = false;
          for (std::int64_t k = 0; k < 5; ++k) {
            const std::int32_t e = p.expert[index(t * 5 + k)];
            any = any || (e >= first && e < end);
          }
          partial_row[index(t * num_ranks + r)] = any ? r * 20 + t : -1;
        }
      }
      for (const int threads : {1, 3}) {
        ThreadPool pool(threads);
        Reduced out{std::vector<std::byte>(whole.bytes.size(), std::byte{0xff})};
        finish({.partials = {partials.data(), DType::kF32, 20 * num_ranks, 130},
                .partial_row = {partial_row.data(), {20, num_ranks}},
                .out = {out.bytes.data(), DType::kF32, 20, 130},
                .execution = {.pool = &pool}});
        EXPECT_EQ(out, whole) << num_ranks << " ranks, " << num_experts << " experts";
      }
    }
  }
}

TEST(Finish, RanksThatDoNotDivideTheGroupsAreOneGroupEach) {
  const Subtree part = subtree_of_rank({.num_experts = 10, .groups = 8}, 2, 3);
  EXPECT_EQ(part.order.groups, 3);
  EXPECT_EQ(part.first_group, 2);
  EXPECT_EQ(part.num_groups, 1);
  EXPECT_EQ(part.order.begin(2), 6);
  EXPECT_EQ(part.order.begin(3), 10);
}

TEST(Finish, GroupsOfARowAndSharedExpertsAreAddedInOrderAndRoundedOnce) {
  const std::vector<float> partials{1e8F, 1.0F, -1e8F, 1.0F};  // ((1e8+1)+(-1e8+1)) = 0 in f32
  const std::vector<float> shared{1.00390625F};
  std::uint16_t out = 0;
  finish({.partials = {reinterpret_cast<const std::byte*>(partials.data()), DType::kF32, 4, 1},
          .groups_per_row = 4,
          .shared = {shared.data(), {1, 1}},
          .out = {reinterpret_cast<std::byte*>(&out), DType::kBF16, 1, 1}});
  EXPECT_EQ(bf16_to_float(out), 1.0F);  // a tie, to even
}

TEST(Finish, AnEmptyTokenIsZero) {
  const std::vector<std::int32_t> rows{-1, -1, -1};
  float out = 5.0F;
  finish({.partials = {nullptr, DType::kF32, 0, 1},
          .partial_row = {rows.data(), {1, 3}},
          .out = {reinterpret_cast<std::byte*>(&out), DType::kF32, 1, 1}});
  EXPECT_EQ(std::bit_cast<std::uint32_t>(out), 0U);
}

TEST(Combine, DisagreeingArgumentsAreErrors) {
  const std::vector<std::int32_t> expert{0, 1};
  const std::vector<float> weight{1, 1};
  Plan owner;
  const PlanView view = owner.reserve(2, 1, 2, 2);
  plan({.assignments =
            DenseAssignments{.expert = {expert.data(), {2, 1}}, .weight = {weight.data(), {2, 1}}},
        .plan = view});
  std::vector<float> data(16);
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const CombineArgs good{.rows = {bytes, DType::kF32, 2, 4},
                         .plan = view,
                         .reduced = {.sums = {bytes + 32, DType::kF32, 2, 4},
                                     .subtree = {.order = {.num_experts = 2}}}};
  EXPECT_NO_THROW(combine(good));
  CombineArgs args = good;
  args.reduced.sums.rows = 1;
  EXPECT_THROW(combine(args), Error);
  args = good;
  args.rows.rows = 1;
  EXPECT_THROW(combine(args), Error);
  args = good;
  args.first_expert = 1;
  EXPECT_THROW(combine(args), Error);
  args = good;
  args.reduced.subtree.num_groups = 9;
  EXPECT_THROW(combine(args), Error);
  args = good;
  args.added = {data.data(), {1, 4}};
  EXPECT_THROW(combine(args), Error);
  args.added = {data.data(), {2, 4}};
  EXPECT_NO_THROW(combine(args));
  args.reduced.each_group = true;
  EXPECT_THROW(combine(args), Error);
  args = good;
  args.reduced.sums.dtype = DType::kF64;
  EXPECT_THROW(combine(args), Error);
  EXPECT_THROW((void)subtree_of_rank({.num_experts = 2}, 2, 2), Error);
  const std::vector<std::int32_t> rows{3};
  EXPECT_THROW(finish({.partials = {bytes, DType::kF32, 2, 4},
                       .partial_row = {rows.data(), {1, 1}},
                       .out = {bytes + 32, DType::kF32, 1, 4}}),
               Error);
}

}  // namespace
}  // namespace switchyard
