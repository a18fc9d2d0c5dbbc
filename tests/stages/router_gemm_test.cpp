#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "core/half.hpp"
#include "route/gemm/tile.hpp"
#include "switchyard/route.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

struct Gemm {
  std::int64_t num_tokens;
  std::int64_t num_experts;
  std::int64_t hidden;
  DType dtype = DType::kF32;
  std::vector<std::byte> tokens{};
  std::vector<float> gate{};
  std::vector<float> bias{};

  Gemm(std::int64_t t, std::int64_t e, std::int64_t h, DType type)
      : num_tokens(t), num_experts(e), hidden(h), dtype(type) {
    const std::vector<float> x = random_floats(t * h, 1);
    tokens.resize(static_cast<std::size_t>(t * h * size_of(type)));
    for (std::int64_t i = 0; i < t * h; ++i) {
      store_float(tokens.data(), type, i, x[static_cast<std::size_t>(i)]);
    }
    gate = random_floats(e * h, 2);
    bias = random_floats(e, 3);
  }

  /// The gate rounded to a type, widened again.
  void round_gate(DType type) {
    for (float& x : gate) x = round_to(type, x);
  }

  [[nodiscard]] std::vector<float> run(std::int64_t first, std::int64_t count,
                                       ThreadPool* pool = nullptr,
                                       DType gate_type = DType::kF32) const {
    std::vector<std::byte> stored(gate.size() * static_cast<std::size_t>(size_of(gate_type)));
    for (std::size_t i = 0; i < gate.size(); ++i) {
      store_float(stored.data(), gate_type, static_cast<std::int64_t>(i), gate[i]);
    }
    std::vector<float> logits(static_cast<std::size_t>(count * num_experts), std::nanf(""));
    const ConstRawMatrix all{tokens.data(), dtype, num_tokens, hidden};
    router_gemm({.tokens = {all.row(first), dtype, count, hidden},
                 .gate = {stored.data(), gate_type, num_experts, hidden},
                 .bias = {bias.data(), {num_experts}},
                 .logits = {logits.data(), {count, num_experts}},
                 .execution = {.pool = pool}});
    return logits;
  }
};

TEST(RouterGemm, IsTheFusedMultiplyAddInAscendingHByBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [t, e, h] : {std::array<std::int64_t, 3>{1, 1, 1},
                                  {3, 5, 7},
                                  {6, 64, 300},
                                  {131, 33, 129},
                                  {2, 100, 0}}) {
      const Gemm gemm(t, e, h, dtype);
      const std::vector<float> logits = gemm.run(0, t);
      for (std::int64_t i = 0; i < t; ++i) {
        for (std::int64_t j = 0; j < e; ++j) {
          float sum = 0.0F;
          for (std::int64_t k = 0; k < h; ++k) {
            sum = std::fma(load_float(gemm.tokens.data(), dtype, i * h + k),
                           gemm.gate[static_cast<std::size_t>(j * h + k)], sum);
          }
          ASSERT_EQ(logits[static_cast<std::size_t>(i * e + j)],
                    sum + gemm.bias[static_cast<std::size_t>(j)])
              << i << " " << j;
        }
      }
    }
  }
}

TEST(RouterGemm, AGateOf16BitsGivesTheBitsOfTheSameValuesInF32) {
  for (const DType gate_type : {DType::kBF16, DType::kF16}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Gemm gemm(37, 45, 300, dtype);  // tiles of 32 experts and 128 of H, cut off on both sides
      gemm.round_gate(gate_type);
      ThreadPool pool(2);
      EXPECT_EQ(gemm.run(0, 37, &pool, gate_type), gemm.run(0, 37));
    }
  }
}

TEST(RouterGemm, ATokensLogitsDependNeitherOnTheOthersNorOnThreads) {
  const Gemm gemm(150, 70, 260, DType::kBF16);
  const std::vector<float> all = gemm.run(0, 150);
  ThreadPool pool(3);
  EXPECT_EQ(gemm.run(0, 150, &pool), all);
  for (const std::int64_t t : {0, 1, 127, 128, 149}) {
    const std::vector<float> row(all.begin() + t * 70, all.begin() + (t + 1) * 70);
    EXPECT_EQ(gemm.run(t, 1), row);
  }
}

TEST(RouterGemm, WrongShapesAndTypesAreErrors) {
  std::vector<float> data(64);
  const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
  const RouterGemmArgs good{.tokens = {bytes, DType::kF32, 2, 4},
                            .gate = {bytes, DType::kF32, 3, 4},
                            .logits = {data.data() + 32, {2, 3}}};
  EXPECT_NO_THROW(router_gemm(good));
  RouterGemmArgs args = good;
  args.gate.cols = 5;
  EXPECT_THROW(router_gemm(args), Error);
  args = good;
  args.bias = {data.data(), {2}};
  EXPECT_THROW(router_gemm(args), Error);
  args = good;
  args.tokens.dtype = DType::kI32;
  EXPECT_THROW(router_gemm(args), Error);
  args = good;
  args.gate.dtype = DType::kF8E4M3;
  test::expect_error(ErrorCode::kInvalidArgument, "gate is fp8, want f32, bf16 or f16",
                     [&] { router_gemm(args); });
}

TEST(RouterTile, WideTilesForManyExpertsAndSplitsWhereTilesAreFew) {
  const auto is = [](RouterTile tile, int columns, int splits) {
    return tile.columns == columns && tile.splits == splits;
  };
  EXPECT_TRUE(is(choose_router_tile(32768, 256, 4096, 132), 256, 1));
  EXPECT_TRUE(is(choose_router_tile(32768, 384, 4096, 132), 192, 1));
  EXPECT_TRUE(is(choose_router_tile(16384, 128, 2048, 132), 128, 1));
  EXPECT_TRUE(is(choose_router_tile(8192, 64, 2048, 132), 64, 2));
  EXPECT_TRUE(is(choose_router_tile(8192, 33, 2048, 132), 64, 2));
  EXPECT_TRUE(is(choose_router_tile(4096, 256, 7168, 132), 256, 4));
  EXPECT_TRUE(is(choose_router_tile(1024, 256, 7168, 132), 64, 4));
}

TEST(RouterTile, IsOneOfTheKernelsAndNoSplitIsWithoutASum) {
  for (std::int64_t tokens = 1; tokens < 100000; tokens = tokens * 3 + 1) {
    for (std::int64_t experts = 1; experts <= 1024; experts = experts * 2 + 1) {
      for (const std::int64_t hidden : {8, 64, 72, 136, 512, 2048, 7168}) {
        const RouterTile tile = choose_router_tile(tokens, experts, hidden, 132);
        EXPECT_TRUE(tile.columns % 64 == 0 && tile.columns >= 64 && tile.columns <= 256);
        EXPECT_TRUE(tile.splits == 1 || tile.splits == 2 || tile.splits == 4);
        EXPECT_LE(tile.splits, (hidden + kRouterTileDepth - 1) / kRouterTileDepth);
        EXPECT_GE(router_blocks(tokens, experts, tile) * kRouterTileRows * tile.columns,
                  tokens * experts * tile.splits);
      }
    }
  }
}

}  // namespace
}  // namespace switchyard
