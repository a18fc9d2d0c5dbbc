// The router's way back, each stage by itself, against the reference in double.
#include <gtest/gtest.h>

#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/router_backward_checks.hpp"

namespace switchyard {
namespace {

using test::at;
using test::expect_error;
using test::Products;
using test::Routed;

constexpr Score kScores[] = {Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid};

/// A stage on the threads of a pool.
template <typename Args>
auto on(ThreadPool& pool, void (*stage)(const Args&)) {
  return [&pool, stage](Args args) {
    args.execution.pool = &pool;
    stage(args);
  };
}

TEST(RouteBackward, EveryRuleAgreesWithTheReferenceInDouble) {
  for (const Score score : kScores) {
    for (const bool renormalize : {true, false}) {
      for (const std::int32_t top_k : {1, 2, 8, 9}) {
        for (const std::int64_t tokens : {0, 1, 15, 16, 17, 50}) {
          const TopKRouter kind{
              .top_k = top_k, .score = score, .renormalize = renormalize, .scale = 2.5F};
          SCOPED_TRACE(testing::Message() << static_cast<int>(score) << " renormalised "
                                          << renormalize << " K " << top_k << " T " << tokens);
          Routed(tokens, 9, kind, 1.0F, 3).expect_reference(false);
          Routed(tokens, 9, kind, 1.0F, 5).expect_reference(true);
        }
      }
    }
  }
}

TEST(RouteBackward, LogitsThatSaturateEveryScoreAgreeWithTheReference) {
  for (const Score score : kScores) {
    for (const bool renormalize : {true, false}) {
      for (const float size : {20.0F, 60.0F, 300.0F, 1e10F}) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(score) << renormalize << " " << size);
        const TopKRouter kind{.top_k = 3, .score = score, .renormalize = renormalize};
        Routed(40, 6, kind, size, 7).expect_reference(false);
      }
    }
  }
}

TEST(RouteBackward, AnUnusedPlaceAndAnExpertThatWasNotChosenGetNothing) {
  for (const Score score : {Score::kTopkSoftmax, Score::kSigmoid}) {
    Routed routed(8, 5, {.top_k = 3, .score = score}, 1.0F, 9);
    for (std::size_t t = 0; t < 8; ++t) routed.expert[3 * t + 1] = -1;
    routed.expect_reference(false);
    routed.expect_reference(true);
    const std::vector<float> dlogits = routed.back(false);
    for (std::size_t t = 0; t < 8; ++t) {
      for (std::int32_t e = 0; e < 5; ++e) {
        const bool chosen = routed.expert[3 * t] == e || routed.expert[3 * t + 2] == e;
        EXPECT_EQ(dlogits[5 * t + at(e)] == 0.0F, !chosen) << t << " " << e;
      }
    }
  }
}

TEST(RouteBackward, ARouterOfOneExpertLearnsWhereItsWeightIsNotOneForSure) {
  for (const Score score : kScores) {
    for (const bool renormalize : {true, false}) {
      const Routed routed(20, 7, {.top_k = 1, .score = score, .renormalize = renormalize}, 1.0F, 1);
      const bool constant = renormalize || score == Score::kTopkSoftmax;
      double sum = 0;
      for (const float dlogit : routed.back(false)) sum += std::abs(dlogit);
      EXPECT_EQ(sum > 0, !constant) << static_cast<int>(score) << renormalize;
    }
  }
}

TEST(RouteBackward, AnyNumberOfThreadsGivesTheSameBits) {
  for (const Score score : kScores) {
    const Routed routed(333, 40, {.top_k = 6, .score = score, .renormalize = false}, 2.0F, 2);
    const std::vector<float> alone = routed.back(true);
    for (const int threads : {2, 3}) {
      ThreadPool pool(threads);
      EXPECT_EQ(routed.back(true, on(pool, route_backward)), alone);
    }
  }
}

TEST(RouteBackward, TheSparseMixerAgreesWithTheReferenceWhateverIsNear) {
  for (const bool renormalize : {true, false}) {
    for (const std::int32_t top_k : {1, 2, 8, 9}) {
      for (const float level : {0.0F, 30.0F, 100.0F, 1000.0F, -20.0F}) {
        SCOPED_TRACE(testing::Message() << renormalize << " K " << top_k << " level " << level);
        Routed routed(50, 9,
                      {.top_k = top_k,
                       .score = Score::kSparseMixer,
                       .renormalize = renormalize,
                       .scale = 2.5F},
                      1.0F, 3);
        routed.choose_best(level);
        routed.expect_reference(false);
        routed.expect_reference(true);
        if (top_k < 2 && renormalize) continue;
        double sum = 0;
        for (const float dlogit : routed.back(false)) sum += std::abs(dlogit);
        EXPECT_GT(sum, level > 0 ? 0.1 : -1) << "some choices have a neighbour";
      }
    }
  }
}

TEST(RouteBackward, ShapesThatDisagreeAndIdsThatAreNoneAreRefusedByName) {
  Routed routed(4, 5, {.top_k = 2}, 1.0F, 1);
  routed.expert[3] = 5;
  expect_error(ErrorCode::kInvalidArgument, "5", [&] { (void)routed.back(false); });
  routed.expert[3] = 1;
  std::vector<float> few(8);
  expect_error(ErrorCode::kInvalidArgument, "dweight", [&] {
    route_backward({.logits = {routed.logits.data(), {4, 5}},
                    .expert = {routed.expert.data(), {4, 2}},
                    .dweight = {few.data(), {2, 2}},
                    .config = routed.config,
                    .dlogits = {routed.losses.data(), {4, 5}}});
  });
}

TEST(RouterGemmBackward, EveryTypeAndOddSizesAgreeWithTheReferenceInDouble) {
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  for (const DType of_tokens : kTypes) {
    for (const DType of_gate : kTypes) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << to_string(of_tokens) << " " << to_string(of_gate));
        Products(0, 5, 3, of_tokens, of_gate).expect_reference(accumulate);
        Products(1, 1, 1, of_tokens, of_gate).expect_reference(accumulate);
        Products(19, 67, 5, of_tokens, of_gate).expect_reference(accumulate);
        Products(7, 300, 2, of_tokens, of_gate).expect_reference(accumulate);
      }
    }
  }
}

TEST(RouterGemmBackward, AnyNumberOfThreadsGivesTheSameBits) {
  const Products products(70, 600, 9, DType::kBF16, DType::kF32);
  const Products::Result alone = products.back(true);
  for (const int threads : {2, 3}) {
    ThreadPool pool(threads);
    EXPECT_TRUE(products.back(true, on(pool, router_gemm_backward)) == alone) << threads;
  }
}

}  // namespace
}  // namespace switchyard
