// Ranks as threads; they share the devices there are, a few blocks each. What the GPUs exchange is
// compared with what the host's ExpertParallel makes of the same input, bit by bit.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "switchyard/error.hpp"
#include "testkit/gpu/device_checker.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;

class ExchangeOfDevices : public testing::TestWithParam<ExchangeWay> {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
  void check_exchanges(const ExchangeProblem& problem, int exchanges = 4) {
    SCOPED_TRACE(problem.name);
    run_ranks(
        problem.num_ranks,
        [&](Communicator& comm) {
          DeviceChecker checker(problem, comm, GetParam());
          for (int epoch = 0; epoch < exchanges; ++epoch) checker.run(epoch);
        },
        std::chrono::seconds(60));
  }
};

// For the checkers of memory, under which the kernels of two ranks on one GPU do not run together.
TEST_P(ExchangeOfDevices, SmallOneRankGivesTheBitsOfTheHost) {
  check_exchanges(problem_of(1, 16, 4, 264, 77));
  ExchangeProblem drops = problem_of(1, 8, 2, 1032, 20);
  drops.drop_some = true;
  drops.config.dispatch_wire = DType::kF8E4M3;
  drops.config.combine_wire = DType::kF8E4M3;
  check_exchanges(drops);
}

TEST_P(ExchangeOfDevices, GivesTheBitsOfTheHostForEveryNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
    check_exchanges(problem_of(ranks, 16, 4, 264, 77));
    check_exchanges(problem_of(ranks, 13, 3, 8, 9));
    check_exchanges(problem_of(ranks, 3, 2, 2304, 10));  // ranks without experts
    ExchangeProblem some = problem_of(ranks, 8, 2, 64, 70);
    some.tokens = {0, 70, 1};
    check_exchanges(some);
  }
}

TEST_P(ExchangeOfDevices, CarriesEveryTypeOverEveryWire) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType wire : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3}) {
      for (const std::int64_t hidden : {2200, 2208}) {  // rows of fp8 end at 8 and at 16 bytes
        ExchangeProblem problem = problem_of(3, 9, 3, hidden, 21);
        problem.config.dtype = dtype;
        problem.config.dispatch_wire = wire;
        problem.config.combine_wire = wire;
        check_exchanges(problem, 2);
      }
    }
  }
}

TEST_P(ExchangeOfDevices, RepeatedUnusedAndDroppedAssignmentsAreRight) {
  for (const auto routing : {ExchangeProblem::Routing::kRepeated, ExchangeProblem::Routing::kUnused,
                             ExchangeProblem::Routing::kOneExpert}) {
    ExchangeProblem problem = problem_of(4, 8, 4, 128, 50);
    problem.routing = routing;
    problem.drop_some = routing == ExchangeProblem::Routing::kUnused;
    check_exchanges(problem);
  }
  check_exchanges(problem_of(2, 6, 6, 128, 5));     // K = E
  check_exchanges(problem_of(4, 64, 32, 128, 40));  // the largest K
  check_exchanges(problem_of(4, 32, 8, 512, 700));  // several chunks
}

TEST_P(ExchangeOfDevices, IsCapturedInAGraphAndReplayedWithOtherRouting) {
  const ExchangeProblem problem = problem_of(4, 16, 4, 256, 60);
  run_ranks(4, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, GetParam());
    replay_twice_in_a_graph(checker, comm, 50);
    for (int epoch = 0; epoch < 2; ++epoch) checker.run(epoch);  // epochs have gone on with it
  });
}

TEST_P(ExchangeOfDevices, ARankThatDoesNotComeIsNamedAndAfterRecoverAllIsRight) {
  const ExchangeProblem problem = problem_of(3, 9, 2, 64, 20);
  run_ranks(3, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, GetParam(), milliseconds(300));
    checker.run(0);
    checker.set_input(1);
    comm.barrier("ready");
    if (comm.rank() != 1) {
      checker.dispatch();
      try {
        checker.synchronize();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTimeout);
        EXPECT_NE(std::string(error.what()).find("waiting for rank 1"), std::string::npos)
            << error.what();
      }
    }
    comm.barrier("seen");
    checker.device_exchange().recover();
    for (int epoch = 0; epoch < 3; ++epoch) checker.run(epoch);
  });
}

TEST_P(ExchangeOfDevices, AnObjectThatGoesFirstKeepsTheMemoryThatOthersStillWriteTo) {
  const ExchangeProblem problem = problem_of(2, 9, 2, 64, 20);
  run_ranks(2, [&](Communicator& comm) {
    auto checker = std::make_unique<DeviceChecker>(problem, comm, GetParam(), milliseconds(300));
    checker->run(0);
    comm.barrier("ran");
    if (comm.rank() == 0) {
      comm.set_timeout(milliseconds(100));  // the other does not end
      checker->end_exchange();
      comm.set_timeout(std::chrono::seconds(30));
      comm.barrier("gone");
    } else {
      comm.barrier("gone");
      checker->set_input(1);
      checker->dispatch();
      try {
        checker->synchronize();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {  // a write to freed memory would be a device error
        EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
      }
    }
  });
}

TEST_P(ExchangeOfDevices, AnExpertOutOfRangeIsReported) {
  const ExchangeProblem problem = problem_of(1, 9, 2, 64, 20);
  run_ranks(1, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, GetParam());
    checker.set_input(0);
    DeviceBytes ids(20 * 2 * 4, checker.stream());
    std::vector<std::int32_t> values(40, 1);
    values[13] = 9;
    ids.set(values);
    DeviceBytes x(20 * 64 * 2, checker.stream());
    DeviceBytes weight(20 * 2 * 4, checker.stream());
    checker.device_exchange().dispatch(
        {.x = {x.as<std::byte>(), DType::kBF16, 20, 64},
         .expert = {ids.as<std::int32_t>(), {20, 2}},
         .weight = {weight.as<float>(), {20, 2}},
         .execution = {.backend = Backend::kCuda, .stream = checker.stream()}});
    try {
      checker.synchronize();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("token 6 has expert 9"), std::string::npos)
          << error.what();
    }
    checker.device_exchange().recover();
    checker.run(3);
  });
}

TEST_P(ExchangeOfDevices, GroupsThatTravelByThemselvesGiveTheBitsOfTheHost) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const DType wire : {DType::kF32, DType::kBF16}) {
      ExchangeProblem problem = problem_of(ranks, 16, 4, 1288, 33);
      problem.config.rank_invariant = true;
      problem.config.combine_wire = wire;
      check_exchanges(problem, 2);
    }
  }
}

TEST_P(ExchangeOfDevices, SharedExpertsAreAddedLast) {
  const ExchangeProblem problem = problem_of(3, 9, 3, 1544, 40);
  run_ranks(3, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, GetParam());
    checker.add_shared();
    for (int epoch = 0; epoch < 3; ++epoch) checker.run(epoch);
  });
}

TEST_P(ExchangeOfDevices, LongRowsOfManyTokensGoRoundEveryRing) {
  check_exchanges(problem_of(4, 32, 4, 7168, 130), 2);
  ExchangeProblem eight_bits = problem_of(2, 32, 4, 7168, 130);
  eight_bits.config.dispatch_wire = DType::kF8E4M3;
  check_exchanges(eight_bits, 2);
}

TEST_P(ExchangeOfDevices, ARankWhoseSumsDoNotComeIsNamedAndAfterRecoverAllIsRight) {
  const ExchangeProblem problem = problem_of(3, 9, 2, 64, 20);
  run_ranks(3, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, GetParam(), milliseconds(300));
    checker.run(0);
    checker.set_input(1);
    const DeviceReceived received = checker.dispatch();
    checker.synchronize();
    comm.barrier("dispatched");
    if (comm.rank() != 1) {
      checker.combine(received);
      try {
        checker.synchronize();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTimeout);
        EXPECT_NE(std::string(error.what()).find("results: waiting for rank 1"), std::string::npos)
            << error.what();
      }
    }
    comm.barrier("seen");
    checker.device_exchange().recover();
    for (int epoch = 0; epoch < 3; ++epoch) checker.run(epoch);
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, ExchangeOfDevices,
                         testing::Values(ExchangeWay(ExchangeMode::kThroughput),
                                         ExchangeWay(ExchangeMode::kThroughput, WayHome::kPush),
                                         ExchangeWay(ExchangeMode::kLowLatency)),
                         [](const auto& way) {
                           if (way.param.mode == ExchangeMode::kLowLatency) return "LowLatency";
                           return way.param.home == WayHome::kPush ? "ThroughputPush"
                                                                   : "Throughput";
                         });

TEST(DeviceExchangeOnly, RowsThatDoNotFitAreDroppedAsOnTheHost) {
  if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  for (const std::int64_t rows : {1, 7, 30}) {
    for (const WayHome home : {WayHome::kPullIfPossible, WayHome::kPush}) {
      ExchangeProblem problem = problem_of(4, 8, 2, 64, 16);
      problem.config.max_recv_rows = rows;
      run_ranks(4, [&](Communicator& comm) {
        DeviceChecker checker(problem, comm, {ExchangeMode::kThroughput, home});
        for (int epoch = 0; epoch < 3; ++epoch) checker.run(epoch);
      });
    }
  }
}

TEST(DeviceExchangeOnly, SumsAreFetchedAndSentInTurnOnOneObject) {
  if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  const ExchangeProblem problem = problem_of(4, 16, 4, 264, 77);
  run_ranks(4, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, ExchangeMode::kThroughput);
    for (int epoch = 0; epoch < 8; ++epoch) {
      checker.set_way_home(epoch % 3 == 0 ? WayHome::kPush : WayHome::kPullIfPossible);
      checker.run(epoch);
    }
  });
}

}  // namespace
}  // namespace switchyard
