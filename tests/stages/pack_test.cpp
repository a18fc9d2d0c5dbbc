#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "switchyard/error.hpp"
#include "switchyard/pack.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

struct Packed {
  std::int64_t num_tokens = 0;
  std::int64_t hidden = 0;
  std::vector<std::byte> x{};
  std::vector<std::byte> rows{};
  Plan plan{};
};

/// Token t goes to experts t % 4 and (t * t) % 4; bytes of x are made up, rows are poisoned.
Packed pack_all(std::int64_t num_tokens, std::int64_t hidden, DType dtype, const Layout& layout,
                ThreadPool* pool) {
  Packed out{.num_tokens = num_tokens, .hidden = hidden};
  std::vector<std::int32_t> expert;
  std::vector<float> weight(static_cast<std::size_t>(2 * num_tokens), 0.5F);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    expert.push_back(static_cast<std::int32_t>(t % 4));
    expert.push_back(static_cast<std::int32_t>(t * t % 4));
  }
  const std::int64_t rows = max_rows(layout, num_tokens, 2, 4, 2 * num_tokens);
  const PlanView view = out.plan.reserve(num_tokens, 2, 4, rows);
  plan({.assignments = DenseAssignments{.expert = {expert.data(), {num_tokens, 2}},
                                        .weight = {weight.data(), {num_tokens, 2}}},
        .layout = layout,
        .padded_rows = 2 * num_tokens,
        .plan = view});
  out.x.resize(static_cast<std::size_t>(num_tokens * hidden * size_of(dtype)));
  for (std::size_t i = 0; i < out.x.size(); ++i) out.x[i] = static_cast<std::byte>(i * 31 % 251);
  out.rows.assign(static_cast<std::size_t>(rows * hidden * size_of(dtype)), std::byte{0xee});
  pack({.x = {out.x.data(), dtype, num_tokens, hidden},
        .plan = view,
        .rows = {out.rows.data(), dtype, rows, hidden},
        .execution = {.pool = pool}});
  return out;
}

TEST(Pack, EveryRowIsItsTokenAndPaddingIsZeroInEveryLayout) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Layout& layout :
         {Layout{}, Layout{LayoutKind::kAligned, 16}, Layout{LayoutKind::kPadded}}) {
      for (const std::int64_t num_tokens : {0, 1, 70}) {
        for (const std::int64_t hidden : {1, 40}) {
          ThreadPool pool(3);
          const Packed out = pack_all(num_tokens, hidden, dtype, layout, &pool);
          EXPECT_EQ(out.rows, pack_all(num_tokens, hidden, dtype, layout, nullptr).rows);
          const PlanView& view = out.plan.view();
          const auto bytes = static_cast<std::size_t>(hidden * size_of(dtype));
          const std::vector<std::byte> zero(bytes);
          for (std::int32_t row = 0; row < view.expert_begin[4]; ++row) {
            const std::int32_t token = view.row_token[row];
            const std::byte* want =
                token < 0 ? zero.data() : out.x.data() + static_cast<std::size_t>(token) * bytes;
            ASSERT_EQ(
                std::memcmp(out.rows.data() + static_cast<std::size_t>(row) * bytes, want, bytes),
                0);
          }
          for (std::size_t i = static_cast<std::size_t>(view.expert_begin[4]) * bytes;
               i < out.rows.size(); ++i) {
            ASSERT_EQ(out.rows[i], std::byte{0xee});  // nothing beyond the layout is touched
          }
        }
      }
    }
  }
}

TEST(Pack, DisagreeingShapesAndTypesAreErrors) {
  const Packed good = pack_all(5, 8, DType::kF32, {}, nullptr);
  std::vector<float> rows(80);
  std::vector<float> x(40);
  const PackArgs fine{.x = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, 5, 8},
                      .plan = good.plan.view(),
                      .rows = {reinterpret_cast<std::byte*>(rows.data()), DType::kF32, 10, 8}};
  EXPECT_NO_THROW(pack(fine));
  PackArgs args = fine;
  args.rows.dtype = DType::kF16;
  EXPECT_THROW(pack(args), Error);
  args = fine;
  args.rows.rows = 9;
  EXPECT_THROW(pack(args), Error);
  args = fine;
  args.x.rows = 4;
  EXPECT_THROW(pack(args), Error);
  args = fine;
  args.rows.cols = 4;
  EXPECT_THROW(pack(args), Error);
}

}  // namespace
}  // namespace switchyard
