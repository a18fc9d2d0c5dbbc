#include <fmt/core.h>
#include <gtest/gtest.h>

#include "switchyard/error.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/exchange_checker.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/rank_harness.hpp"
#include "testkit/sanitized.hpp"

namespace switchyard {
namespace {

/// Several exchanges on one object: buffers alternate, and a rank may run ahead.
void check_exchanges(const ExchangeProblem& problem, int exchanges = 4) {
  if (!has_ranks(problem.num_ranks)) return;
  SCOPED_TRACE(problem.name);
  on_ranks(problem.num_ranks, [&](Communicator& comm) {
    ExpertParallel exchange(comm, problem.config);
    Checker checker(problem, comm);
    for (int epoch = 0; epoch < exchanges; ++epoch) checker.run(exchange, epoch);
  });
}

ExchangeProblem problem_of(int num_ranks, std::int32_t num_experts, std::int32_t top_k,
                           std::int64_t hidden, std::int64_t max_tokens) {
  return {
      .name = fmt::format("R{} E{} K{} H{} T{}", num_ranks, num_experts, top_k, hidden, max_tokens),
      .num_ranks = num_ranks,
      .config = {
          .num_experts = num_experts, .top_k = top_k, .hidden = hidden, .max_tokens = max_tokens}};
}

TEST(ExpertParallel, EveryRowTrafficAndResultIsWhatPlainLoopsGive) {
  for (const int ranks : {1, 2, 3, 4, 5, 7, 8}) {
    check_exchanges(problem_of(ranks, 16, 4, 24, 13));
    check_exchanges(problem_of(ranks, 13, 3, 5, 9));  // E does not divide by R, odd H
  }
}

TEST(ExpertParallel, RanksMayHoldNoExpertOrHaveNoToken) {
  for (const int ranks : {2, 3, 4, 5, 7, 8}) {
    check_exchanges(problem_of(ranks, 1, 1, 8, 6));
    check_exchanges(problem_of(ranks, 3, 2, 8, 6));
    ExchangeProblem some = problem_of(ranks, 8, 2, 8, 9);
    some.tokens = {0, 9, 1};
    check_exchanges(some);
    ExchangeProblem nobody = problem_of(ranks, 8, 2, 8, 9);
    nobody.tokens = {0};
    check_exchanges(nobody);
    check_exchanges(problem_of(ranks, 8, 2, 8, 0));
  }
}

TEST(ExpertParallel, AllExpertsOfATokenRepeatedIdsAndUnusedOnesAreRight) {
  for (const int ranks : {1, 3, 4}) {
    check_exchanges(problem_of(ranks, 6, 6, 10, 5));  // K = E
    for (const auto routing :
         {ExchangeProblem::Routing::kRepeated, ExchangeProblem::Routing::kOneExpert,
          ExchangeProblem::Routing::kUnused}) {
      ExchangeProblem problem = problem_of(ranks, 8, 4, 10, 7);
      problem.routing = routing;
      check_exchanges(problem);
      problem.config.rank_invariant = true;
      check_exchanges(problem);
    }
  }
}

TEST(ExpertParallel, DroppedAssignmentsAreNotSent) {
  for (const int ranks : {1, 2, 4, 5}) {
    ExchangeProblem problem = problem_of(ranks, 8, 3, 16, 11);
    problem.drop_some = true;
    check_exchanges(problem);
  }
}

TEST(ExpertParallel, EveryWireTypeCarriesEveryTokenType) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType wire : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3}) {
      ExchangeProblem problem = problem_of(3, 9, 3, kSanitized ? 40 : 200, 7);
      problem.config.dtype = dtype;
      problem.config.dispatch_wire = wire;
      problem.config.combine_wire = wire;
      check_exchanges(problem);
      problem.num_ranks = 4;
      problem.config.rank_invariant = true;
      check_exchanges(problem);
    }
  }
}

TEST(ExpertParallel, WithRankInvariantARowComesHomePerTokenAndGroup) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const std::int32_t groups : {1, 4, 8, 16}) {
      ExchangeProblem problem = problem_of(ranks, 13, 4, 12, 9);
      problem.config.rank_invariant = true;
      problem.config.reduction_groups = groups;
      problem.config.combine_wire = DType::kBF16;
      check_exchanges(problem);
    }
  }
}

TEST(ExpertParallel, RowsThatDoNotFitAreDroppedWholeInOrderOfSourceAndToken) {
  for (const int ranks : {1, 2, 4, 5}) {
    for (const std::int64_t rows : {1, 3, 7, 10}) {
      ExchangeProblem problem = problem_of(ranks, 8, 2, 6, 8);
      problem.config.max_recv_rows = rows;
      check_exchanges(problem);
      problem.config.rank_invariant = true;
      problem.routing = ExchangeProblem::Routing::kOneExpert;
      check_exchanges(problem);
    }
  }
}

TEST(ExpertParallel, TheRowsDoNotDependOnTheThreadsOfARank) {
  ExchangeProblem problem = problem_of(3, 16, 4, 64, 60);
  problem.config.combine_wire = DType::kF8E4M3;
  on_ranks(3, [&](Communicator& comm) {
    ThreadPool pool(3);
    ExpertParallel exchange(comm, problem.config);
    Checker checker(problem, comm);
    for (int epoch = 0; epoch < 5; ++epoch) checker.run(exchange, epoch, &pool);
  });
}

TEST(ExpertParallel, IdentityExpertsWithWeightsThatSumToOneGiveTheTokensBack) {
  for (const int ranks : {1, 2, 4, 8}) {
    if (!has_ranks(ranks)) continue;
    on_ranks(ranks, [&](Communicator& comm) {
      const std::int64_t tokens = 40;
      const std::int64_t hidden = 32;
      ExpertParallel exchange(comm, {.num_experts = 16,
                                     .top_k = 2,
                                     .hidden = hidden,
                                     .max_tokens = tokens,
                                     .dtype = DType::kBF16,
                                     .combine_wire = DType::kBF16});
      ExchangeProblem problem = problem_of(ranks, 16, 2, hidden, tokens);
      problem.config.dtype = DType::kBF16;
      RankInput input = make_input(problem, comm.rank(), 0);
      for (std::int64_t i = 0; i < tokens * 2; ++i) {
        input.weight[static_cast<std::size_t>(i)] = i % 2 == 0 ? 0.625F : 0.375F;
      }
      const Received received =
          exchange.dispatch({.x = {input.x.data(), DType::kBF16, tokens, hidden},
                             .expert = {input.expert.data(), {tokens, 2}},
                             .weight = {input.weight.data(), {tokens, 2}}});
      std::vector<std::uint16_t> partials;
      for (std::int64_t i = 0; i < received.x.rows; ++i) {
        const float weight = received.weight.row(i)[0] + received.weight.row(i)[1];
        for (std::int64_t h = 0; h < hidden; ++h) {
          partials.push_back(
              float_to_bf16(weight * load_float(received.x.row(i), DType::kBF16, h)));
        }
      }
      std::vector<float> out(static_cast<std::size_t>(tokens * hidden));
      exchange.combine(
          {.partials = {reinterpret_cast<const std::byte*>(partials.data()), DType::kBF16,
                        received.x.rows, hidden},
           .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, tokens, hidden}});
      for (std::int64_t i = 0; i < tokens * hidden; ++i) {
        const float x = load_float(input.x.data(), DType::kBF16, i);
        // Two parts, each rounded once to bf16.
        ASSERT_NEAR(out[static_cast<std::size_t>(i)], x, std::fabs(x) * 0x1p-8F);
      }
    });
  }
}

TEST(ExpertParallel, AReceivedResultStaysUntilTheSecondFollowingDispatchAndAnOldOneIsNotCombined) {
  ExchangeProblem problem = problem_of(3, 8, 2, 16, 12);
  on_ranks(3, [&](Communicator& comm) {
    ExpertParallel exchange(comm, problem.config);
    const auto dispatch = [&](int epoch) {
      const RankInput input = make_input(problem, comm.rank(), epoch);
      return exchange.dispatch({.x = {input.x.data(), DType::kF32, 12, 16},
                                .expert = {input.expert.data(), {12, 2}},
                                .weight = {input.weight.data(), {12, 2}}});
    };
    const Received first = dispatch(0);
    const std::vector<std::byte> copy(first.x.data, first.x.data + first.x.bytes());
    const Received second = dispatch(1);
    comm.barrier("everybody has sent");
    EXPECT_TRUE(std::equal(copy.begin(), copy.end(), first.x.data));
    EXPECT_EQ(first.number, 1U);
    EXPECT_EQ(second.number, 2U);
    std::vector<float> partials(static_cast<std::size_t>(second.x.rows * 16));
    std::vector<float> out(12 * 16);
    const auto combine = [&](const Received& received) {
      exchange.combine({.partials = {reinterpret_cast<std::byte*>(partials.data()), DType::kF32,
                                     second.x.rows, 16},
                        .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, 12, 16},
                        .of = received.number});
    };
    test::expect_error(ErrorCode::kInvalidArgument, "partials are of dispatch 1, the last is 2",
                       [&] { combine(first); });
    comm.barrier("refused");
    combine(second);
  });
}

TEST(ExpertParallel, TwoObjectsMayShareOneCommunicator) {
  const ExchangeProblem a = problem_of(3, 8, 2, 16, 12);
  const ExchangeProblem b = problem_of(3, 5, 3, 7, 4);
  on_ranks(3, [&](Communicator& comm) {
    ExpertParallel first(comm, a.config);
    ExpertParallel second(comm, b.config);
    for (int epoch = 0; epoch < 3; ++epoch) {
      Checker(a, comm).run(first, epoch);
      Checker(b, comm).run(second, epoch);
    }
  });
}

TEST(ExpertParallel, TwoCommunicatorsOfOneProcessDoNotMixWhatTheyCarry) {
  const ExchangeProblem a = problem_of(4, 8, 2, 16, 12);
  const ExchangeProblem b = problem_of(4, 5, 3, 7, 4);
  on_ranks_with_two(4, [&](Communicator& comm, Communicator& other) {
    ExpertParallel first(comm, a.config);
    ExpertParallel second(other, b.config);
    for (int epoch = 0; epoch < 3; ++epoch) {
      Checker(a, comm).run(first, epoch);
      Checker(b, other).run(second, epoch);
    }
    comm.give_up("the first one is told to stop");
    comm.recover();  // which the other does not notice
    for (int epoch = 3; epoch < 5; ++epoch) {
      Checker(b, other).run(second, epoch);
      Checker(a, comm).run(first, epoch);
    }
    EXPECT_EQ(comm.recoveries(), 1U);
    EXPECT_EQ(other.recoveries(), 0U);
    other.barrier("end");
  });
}

TEST(ExpertParallel, TokensMayHaveThirtyTwoExperts) {
  for (const int ranks : {1, 3, 4, 6}) check_exchanges(problem_of(ranks, 40, 32, 24, 9));
}

}  // namespace
}  // namespace switchyard
