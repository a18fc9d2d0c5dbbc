// The experts of a few tokens on the device against plain loops in double: awkward counts, sizes
// that no tile divides, every activation and type, both copy paths; and bits against the order of
// sums.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/streaming_fixture.hpp"

namespace switchyard {
namespace {

void expect_close(const Problem& problem) {
  SCOPED_TRACE(problem.name);
  const Fixture fixture(problem);
  const std::vector<float> got = fixture.run(fixture.params());
  const std::vector<reference::Bounded> want = fixture.expected();
  EXPECT_EQ(reference::check_output(want, problem.hidden, DType::kF32, got), "");
}

std::vector<Problem> problems() {
  std::vector<Problem> list = {
      {.name = "one token", .experts = {{3, 0, 5}}},
      {.name = "a token without experts", .experts = {{}, {1, 2}, {}}},
      {.name = "repeated ids", .experts = {{2, 2, 2}, {2, 7, 7}}},
      {.name = "all 70 tokens to one expert", .experts = spread(70, 1, 1, 3), .inner = 72},
      {.name = "K = E", .experts = spread(5, 8, 8, 4)},
      {.name = "E = 1", .experts = spread(9, 1, 1, 5), .num_experts = 1},
      {.name = "many experts, short rows",
       .experts = spread(7, 6, 300, 6),
       .num_experts = 300,
       .hidden = 136,
       .inner = 24},
      {.name = "rows of many blocks",
       .experts = spread(4, 2, 4, 7),
       .num_experts = 4,
       .hidden = 7168,
       .inner = 256},
      {.name = "long sums",
       .experts = spread(3, 2, 3, 8),
       .num_experts = 3,
       .hidden = 2048,
       .inner = 2056},
      {.name = "many rows of few experts",
       .experts = spread(50, 2, 3, 9),
       .num_experts = 3,
       .hidden = 520,
       .inner = 392},
      {.name = "smallest", .experts = {{0}}, .num_experts = 1, .hidden = 8, .inner = 8},
  };
  const std::size_t shapes = list.size();
  for (std::size_t i = 0; i < shapes; ++i) {
    Problem p = list[i];
    p.dtype = DType::kF32;
    p.name += ", f32";
    p.plan_is_older = true;
    list.push_back(p);
    p = list[i];
    p.dtype = DType::kF16;
    p.path = StreamingPath::kPortable;
    p.name += ", f16, portable";
    list.push_back(p);
  }
  list.push_back({.name = "f32, multiples of 4",
                  .experts = spread(6, 3, 8, 10),
                  .hidden = 1028,
                  .inner = 36,
                  .dtype = DType::kF32,
                  .bias = true});
  list.push_back({.name = "f32, portable",
                  .experts = spread(6, 3, 8, 10),
                  .hidden = 1028,
                  .inner = 36,
                  .dtype = DType::kF32,
                  .bias = true,
                  .path = StreamingPath::kPortable});
  list.push_back({.name = "packed", .experts = spread(6, 3, 8, 11), .packed = true});
  for (int kind = 0; kind <= static_cast<int>(Activation::kIdentity); ++kind) {
    for (const bool gated : {true, false}) {
      const auto activation = static_cast<Activation>(kind);
      if (!gated && activation == Activation::kClampedSwiglu) continue;
      list.push_back({.name = std::string(to_string(activation)) + (gated ? "" : ", plain"),
                      .experts = spread(12, 3, 8, 12),
                      .dtype = DType::kF32,
                      .gated = gated,
                      .activation = activation,
                      .bias = true});
    }
  }
  return list;
}

TEST(Streaming, EveryProblemMatchesLoopsInDouble) {
  for (const Problem& problem : problems()) expect_close(problem);
}

TEST(Streaming, NoTokenIsNoWork) {
  const Fixture fixture({.name = "no token", .experts = {}});
  EXPECT_TRUE(fixture.run(fixture.params()).empty());
}

TEST(Streaming, RowsAreAddedInTheFixedOrder) {
  // Few tokens are added a lane for each group, many a thread for each output.
  for (const int tokens : {11, 90}) {
    const DType dtype = tokens == 11 ? DType::kBF16 : DType::kF32;
    const Problem problem{
        .name = "order", .experts = spread(tokens, 9, 21, 13), .num_experts = 21, .dtype = dtype};
    const Fixture fixture(problem);
    const Fixture apart(problem, true);
    const std::vector<float> y = apart.run(apart.params());
    StreamingParams each = fixture.params();
    each.each_group = true;
    const std::vector<float> sums = fixture.run(fixture.params());
    const std::vector<float> groups = fixture.run(each, 8);
    const auto h = static_cast<std::size_t>(problem.hidden);
    const ReductionOrder order{21, 8};
    for (std::size_t t = 0; t < problem.experts.size(); ++t) {
      for (std::size_t k = 0; k < h; ++k) {
        float g[8] = {};
        for (int i = fixture.token_begin()[t]; i < fixture.token_begin()[t + 1]; ++i) {
          const auto row =
              static_cast<std::size_t>(fixture.token_row()[static_cast<std::size_t>(i)]);
          int group = 0;
          while (fixture.row_expert()[row] >= order.begin(group + 1)) ++group;
          g[group] = std::fma(fixture.row_weight()[row], y[row * h + k], g[group]);
        }
        const float want = ((g[0] + g[1]) + (g[2] + g[3])) + ((g[4] + g[5]) + (g[6] + g[7]));
        ASSERT_EQ(sums[t * h + k], want) << "token " << t << ", column " << k;
        for (std::size_t group = 0; group < 8; ++group) {
          ASSERT_EQ(groups[(t * 8 + group) * h + k], g[group]);
        }
      }
    }
  }
}

TEST(Streaming, BitsDoNotChangeFromRunToRun) {
  const Fixture fixture({.name = "bits",
                         .experts = spread(24, 4, 32, 14),
                         .num_experts = 32,
                         .hidden = 1024,
                         .inner = 256});
  const std::vector<float> first = fixture.run(fixture.params());
  for (int repeat = 0; repeat < 50; ++repeat) {
    const std::vector<float> again = fixture.run(fixture.params());
    ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0);
  }
}

TEST(Streaming, WithBatchInvariantATokenDoesNotSeeTheBatch) {
  Problem many{.name = "batch",
               .experts = spread(40, 2, 4, 15),
               .num_experts = 4,
               .hidden = 512,
               .inner = 320,
               .batch_invariant = true};
  Problem one = many;
  one.experts.resize(1);
  const Fixture alone(one);
  // Weights of rows are drawn in the order of the plan: give token 0 the same in both.
  const Fixture among(many);
  StreamingParams a = among.params();
  const std::vector<float> in_batch = among.run(a);
  const Fixture rows_alone(one, true);
  const std::vector<float> y = rows_alone.run(rows_alone.params());
  std::vector<float> want(512);
  float g[8][512] = {};
  const ReductionOrder order{4, 8};
  for (int i = among.token_begin()[0]; i < among.token_begin()[1]; ++i) {
    const auto row = static_cast<std::size_t>(among.token_row()[static_cast<std::size_t>(i)]);
    int group = 0;
    while (among.row_expert()[row] >= order.begin(group + 1)) ++group;
    const auto local = static_cast<std::size_t>(i - among.token_begin()[0]);
    for (std::size_t k = 0; k < 512; ++k) {
      g[group][k] = std::fma(among.row_weight()[row], y[local * 512 + k], g[group][k]);
    }
  }
  for (std::size_t k = 0; k < 512; ++k) {
    const float sum =
        ((g[0][k] + g[1][k]) + (g[2][k] + g[3][k])) + ((g[4][k] + g[5][k]) + (g[6][k] + g[7][k]));
    ASSERT_EQ(in_batch[k], sum) << "column " << k;
  }
}

TEST(Streaming, SixteenBitSumsAreTheRoundedOnes) {
  const Fixture fixture({.name = "round", .experts = spread(5, 3, 8, 16)});
  const std::vector<float> sums = fixture.run(fixture.params());
  StreamingParams d = fixture.params();
  d.sums_dtype = DType::kBF16;
  const auto bf16 = fixture.run<std::uint16_t>(d);
  d.sums_dtype = DType::kF16;
  const auto f16 = fixture.run<std::uint16_t>(d);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    ASSERT_EQ(bf16[i], float_to_bf16(sums[i]));
    ASSERT_EQ(f16[i], float_to_f16(sums[i]));
  }
}

TEST(Streaming, AGraphFollowsTheRoutingOfEachReplay) {
  const Problem a{.name = "a", .experts = spread(6, 2, 8, 17)};
  Problem b = a;
  b.experts = spread(6, 2, 8, 18);
  const Fixture first(a);
  const Fixture second(b);
  const std::vector<float> want = second.run(second.params());
  DeviceBytes sums(want.size() * sizeof(float));
  StreamingParams d = first.params();
  d.sums = sums.data();
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  const CapturedGraph graph(stream, [&] { launch_streaming(d, stream); });
  graph.launch();
  const StreamingParams other = second.params();
  const auto overwrite = [&](const void* to, const void* from, std::int64_t count) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(const_cast<void*>(to), from,
                                    static_cast<std::size_t>(count) * 4, cudaMemcpyDeviceToDevice,
                                    stream));
  };
  overwrite(d.expert_begin, other.expert_begin, 9);
  overwrite(d.expert_rows, other.expert_rows, 8);
  overwrite(d.row_token, other.row_token, 12);
  overwrite(d.row_weight, other.row_weight, 12);
  overwrite(d.token_begin, other.token_begin, 7);
  overwrite(d.token_row, other.token_row, 12);
  graph.launch();
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  std::vector<float> got(want.size());
  SWITCHYARD_CUDA(cudaMemcpy(got.data(), sums.data(), got.size() * 4, cudaMemcpyDeviceToHost));
  EXPECT_EQ(got, want);
  cudaStreamDestroy(stream);
}

TEST(Streaming, ManyRowsOfAnExpertAreLeftToTheGroupedGemm) {
  const StreamingChip hopper{.num_sms = 132, .hopper = true};
  const StreamingChip other{.num_sms = 108};
  StreamingParams p;
  p.num_experts = 8;
  const auto worth = [&](DType dtype, std::int64_t rows, const StreamingChip& chip) {
    p.dtype = dtype;
    p.max_assignments = rows;
    return worth_streaming(p, chip);
  };
  EXPECT_TRUE(worth(DType::kBF16, 32, hopper));
  EXPECT_FALSE(worth(DType::kBF16, 33, hopper));
  EXPECT_TRUE(worth(DType::kF16, 192, other));
  EXPECT_FALSE(worth(DType::kF16, 193, other));
  EXPECT_TRUE(worth(DType::kF32, 64, hopper));
  EXPECT_FALSE(worth(DType::kF32, 65, hopper));
  EXPECT_TRUE(worth(DType::kF32, 2000, other));
  p.total_experts = 32;  // three of four assignments are other ranks' work
  EXPECT_TRUE(worth(DType::kBF16, 128, hopper));
  EXPECT_FALSE(worth(DType::kBF16, 129, hopper));
}

TEST(Streaming, TilesAndWithThemBitsDoNotDependOnThePlansAge) {
  StreamingProblem p;
  const auto tiles = [&p](bool plan_is_older) {
    p.plan_is_older = plan_is_older;
    const StreamingShape shape = choose_streaming(p, kHopperChip);
    return std::pair(shape.up.tiles, shape.down.tiles);
  };
  for (const WeightFormat format :
       {WeightFormat::kExact, WeightFormat::kMxfp4, WeightFormat::kE4M3}) {
    for (const int experts : {8, 32, 128}) {
      for (const std::int64_t hidden : {512, 2048, 2880, 7168}) {
        for (const std::int64_t tokens : {1, 2, 4, 8}) {
          p.format = format;
          p.num_experts = experts;
          p.hidden = p.inner = hidden;
          p.num_tokens = tokens;
          p.max_rows = p.max_assignments = 4 * tokens;
          EXPECT_EQ(tiles(false), tiles(true))
              << to_string(format) << " E " << experts << " H " << hidden << " T " << tokens;
        }
      }
    }
  }
}

TEST(Streaming, WhatCannotRunIsRefusedBeforeAnyLaunch) {
  const Fixture fixture({.name = "refuse", .experts = spread(2, 1, 8, 19)});
  const auto code = [](const StreamingParams& d) {
    try {
      launch_streaming(d, nullptr);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kIo;  // never thrown here
  };
  StreamingParams d = fixture.params();
  d.hidden = 260;
  EXPECT_EQ(code(d), ErrorCode::kInvalidArgument);
  d = fixture.params();
  d.w2 = static_cast<const std::byte*>(d.w2) + 2;
  EXPECT_EQ(code(d), ErrorCode::kInvalidArgument);
  d = fixture.params();
  d.num_experts = 1025;
  EXPECT_EQ(code(d), ErrorCode::kInvalidArgument);
  d = fixture.params();
  d.max_rows = d.max_assignments = 1 << 20;
  EXPECT_EQ(code(d), ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace switchyard
