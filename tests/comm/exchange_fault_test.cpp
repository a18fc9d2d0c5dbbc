#include <fmt/core.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>

#include "comm/expert_parallel_check.hpp"
#include "comm/ranks/faults.hpp"
#include "testkit/exchange_checker.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/rank_harness.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kDeadline{200};
constexpr int kRanks = 4;

const ExchangeProblem kProblem = {
    .name = "faults",
    .num_ranks = kRanks,
    .config = {.num_experts = 10, .top_k = 3, .hidden = 33, .max_tokens = 17}};

struct Outcome {
  bool failed = false;
  std::string what;
};

/// One exchange whose failure is reported; anything but an Error or the fault's own fails the test.
Outcome try_exchange(Checker& checker, ExpertParallel& exchange, int epoch) {
  try {
    checker.run(exchange, epoch);
    return {};
  } catch (const std::runtime_error& error) {
    return {true, error.what()};
  }
}

/// A fault of rank 2 in exchange 1 of 3: everybody leaves in time, and after recover() the same
/// object exchanges rightly.
void check_fault(Fault fault, const std::string& words_of_others) {
  if (!has_ranks(kRanks)) GTEST_SKIP();
  on_ranks(kRanks, [&](Communicator& inner) {
    const auto comm = make_faulty(inner);
    ExpertParallel exchange(*comm, kProblem.config);
    Checker checker(kProblem, *comm);
    checker.run(exchange, 0);
    for (int round = 1; round <= 2; ++round) {
      comm->barrier("armed");
      const bool waits = fault == Fault::kAbsent || fault == Fault::kLate;
      if (waits) comm->set_timeout(kDeadline);
      if (comm->rank() == 2) comm->arm(fault);
      const auto start = Clock::now();
      Outcome outcome = try_exchange(checker, exchange, 10 * round);
      // A rank that had all it needed may notice only in the next exchange.
      if (!outcome.failed) outcome = try_exchange(checker, exchange, 10 * round + 1);
      EXPECT_TRUE(outcome.failed) << "rank " << comm->rank();
      EXPECT_LT(Clock::now() - start, 2 * kDeadline + milliseconds(4000)) << outcome.what;
      if (comm->rank() != 2) {
        EXPECT_NE(outcome.what.find(words_of_others), std::string::npos) << outcome.what;
      }
      comm->set_timeout(milliseconds(20000));
      comm->recover();
      for (int epoch = 0; epoch < 3; ++epoch) checker.run(exchange, 10 * round + 2 + epoch);
    }
  });
}

TEST(Faults, ARankThatNeverArrivesIsNamedAndAllLeave) { check_fault(Fault::kAbsent, "rank 2"); }

TEST(Faults, ARankThatComesLateIsNamedAndAllLeave) { check_fault(Fault::kLate, "rank 2"); }

TEST(Faults, ARankThatThrowsMakesTheOthersLeaveWithItsReason) {
  check_fault(Fault::kThrow, "left because rank 2 failed: a fault was asked for");
}

TEST(Faults, ACorruptCountIsFoundAndAllLeave) {
  check_fault(Fault::kCorruptCount, "counts: the message of rank 2 to rank 2 is damaged");
}

TEST(Faults, RanksThatDisagreeOnTheConfigurationAreEachToldWhat) {
  on_ranks(3, [](Communicator& comm) {
    ExpertParallelConfig config = kProblem.config;
    if (comm.rank() == 1) config.hidden = 64;
    if (comm.rank() == 2) config.dtype = DType::kBF16;
    try {
      const ExpertParallel exchange(comm, config);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommunication);
      const std::string what = error.what();
      EXPECT_NE(what.find(comm.rank() == 1 ? "hidden=33" : "hidden=64"), std::string::npos) << what;
      EXPECT_NE(what.find(comm.rank() == 2 ? "dtype=f32" : "dtype=bf16"), std::string::npos)
          << what;
    }
    config = kProblem.config;  // afterwards the ranks can go on
    config.max_tokens = 17;
    ExpertParallel exchange(comm, config);
    ExchangeProblem problem = kProblem;
    problem.num_ranks = 3;
    Checker(problem, comm).run(exchange, 0);
  });
}

TEST(Faults, EachValueThatOneRankHasDifferentlyIsNamedOnEveryRank) {
  using Config = ExpertParallelConfig;
  const struct {
    void (*change)(Config&);
    const char* name;
    const char* values[2];  // of the others, of rank 1
  } cases[] = {
      {[](Config& c) { c.num_experts = 11; }, "num_experts", {"10", "11"}},
      {[](Config& c) { c.top_k = 2; }, "top_k", {"3", "2"}},
      {[](Config& c) { c.hidden = 32; }, "hidden", {"33", "32"}},
      {[](Config& c) { c.max_tokens = 16; }, "max_tokens", {"17", "16"}},
      {[](Config& c) { c.dtype = DType::kF16; }, "dtype", {"f32", "f16"}},
      {[](Config& c) { c.dispatch_wire = DType::kF8E4M3; }, "dispatch_wire", {"f32", "fp8"}},
      {[](Config& c) { c.combine_wire = DType::kBF16; }, "combine_wire", {"f32", "bf16"}},
      {[](Config& c) { c.reduction_groups = 4; }, "reduction_groups", {"8", "4"}},
      {[](Config& c) { c.rank_invariant = true; }, "rank_invariant", {"0", "1"}},
      {[](Config& c) { c.max_recv_rows = 5; }, "max_recv_rows", {"0", "5"}},
  };
  on_ranks(3, [&](Communicator& comm) {
    const auto refused = [&comm](const auto& make, const std::string& name,
                                 const char* const* values) {
      const bool differs = comm.rank() == 1;
      for (const std::string& words :
           {fmt::format("rank {} has {}={}", differs ? 0 : 1, name, values[differs ? 0 : 1]),
            fmt::format("rank {} (here) has {}", comm.rank(), values[differs ? 1 : 0])}) {
        test::expect_error(ErrorCode::kCommunication, words, make);
        comm.barrier("told");
      }
    };
    for (const auto& [change, name, values] : cases) {
      Config config = kProblem.config;
      if (comm.rank() == 1) change(config);
      refused([&] { const ExpertParallel exchange(comm, config); }, name, values);
    }
    const char* const versions[] = {"1", "2"};
    refused(
        [&] {
          require_same_config(comm, kProblem.config, comm.rank() == 1 ? 2 : kProtocolVersion);
        },
        "protocol version", versions);
  });
}

TEST(Faults, AnImpossibleConfigurationIsRefusedOnEveryRank) {
  using Config = ExpertParallelConfig;
  const struct {
    void (*spoil)(Config&);
    const char* words;
  } cases[] = {
      {[](Config& c) { c.num_experts = 0; }, "num_experts=0"},
      {[](Config& c) { c.top_k = 0; }, "top_k=0, want at least 1"},
      {[](Config& c) { c.hidden = 0; }, "hidden=0"},
      {[](Config& c) { c.max_tokens = -1; }, "max_tokens=-1"},
      {[](Config& c) { c.dtype = DType::kF8E4M3; }, "dtype=fp8"},
      {[](Config& c) { c.combine_wire = DType::kI32; }, "combine_wire=i32"},
      {[](Config& c) { c.reduction_groups = 0; }, "reduction_groups=0"},
      {[](Config& c) { c.max_recv_rows = -5; }, "max_recv_rows=-5"},
  };
  for (const auto& [spoil, words] : cases) {
    Config config = kProblem.config;
    spoil(config);
    on_ranks(2, [&config, &words = words](Communicator& comm) {
      test::expect_error(ErrorCode::kInvalidArgument, words,
                         [&] { const ExpertParallel exchange(comm, config); });
    });
  }
}

TEST(Faults, ABadCallIsRefusedBeforeAnythingIsSent) {
  const auto comm = make_single_rank();
  const ExpertParallelConfig& config = kProblem.config;
  ExpertParallel exchange(*comm, config);
  std::vector<float> x(20 * 33, 1.0F);
  std::vector<std::int32_t> expert(60, 3);
  std::vector<float> weight(60, 0.5F);
  const auto refused = [&](std::int64_t tokens, const std::string& words) {
    test::expect_error(ErrorCode::kInvalidArgument, words, [&] {
      exchange.dispatch({.x = {reinterpret_cast<std::byte*>(x.data()), DType::kF32, tokens, 33},
                         .expert = {expert.data(), {tokens, 3}},
                         .weight = {weight.data(), {tokens, 3}}});
    });
  };
  refused(18, "18 tokens exceed max_tokens=17");
  expert[7] = 10;
  refused(3, "token 2 has expert 10, want -1 to 9");
  expert[7] = -2;
  refused(3, "token 2 has expert -2");
  expert[7] = 0;
  weight[4] = std::nanf("");
  refused(3, "token 1 has a NaN weight for expert 3");
  weight[4] = 0;
  float out = 0;
  EXPECT_THROW(exchange.combine({.out = {reinterpret_cast<std::byte*>(&out), DType::kF32, 0, 33}}),
               Error);
  ExchangeProblem problem = kProblem;
  problem.num_ranks = 1;
  Checker(problem, *comm).run(exchange, 0);
}

}  // namespace
}  // namespace switchyard
