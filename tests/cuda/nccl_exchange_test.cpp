// The exchange between GPUs over NCCL, by its windows and by its sends and receives, one rank a
// GPU: ranks as threads, then as processes. Skipped where there are fewer than two GPUs, or no
// NCCL.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "comm/nccl/nccl.hpp"
#include "comm/nccl/windows/windows.hpp"
#include "comm/ranks/agreement.hpp"
#include "comm/ranks/launch.hpp"
#include "switchyard/error.hpp"
#include "testkit/gpu/device_checker.hpp"
#include "testkit/processes.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

int most_ranks() { return std::min(num_devices(), 8); }

/// Why the tests cannot run here, or "".
std::string reason_to_skip() {
  if (num_devices() < 2) return fmt::format("{} GPU, want 2", num_devices());
  return nccl_windows_missing();
}

struct Way {
  DeviceEngine engine;
  ExchangeMode mode;
};

constexpr Way kWays[] = {{DeviceEngine::kNccl, ExchangeMode::kThroughput},
                         {DeviceEngine::kNccl, ExchangeMode::kLowLatency},
                         {DeviceEngine::kNcclPairs, ExchangeMode::kThroughput},
                         {DeviceEngine::kNcclPairs, ExchangeMode::kLowLatency}};

class NcclExchange : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  }
  static bool may_be_captured() {
    return GetParam().engine == DeviceEngine::kNccl || GetParam().mode == ExchangeMode::kLowLatency;
  }
};

void run_checks(const ExchangeProblem& problem, Communicator& comm, const Way& way) {
  DeviceChecker checker(problem, comm, way.mode, seconds(20), way.engine);
  EXPECT_EQ(checker.device_exchange().engine(), comm.size() > 1 ? way.engine : DeviceEngine::kPeer);
  for (int epoch = 0; epoch < 4; ++epoch) checker.run(epoch);
}

TEST_P(NcclExchange, GivesTheBitsOfTheHostForEveryNumberOfRanks) {
  for (int ranks = 1; ranks <= most_ranks(); ++ranks) {
    ExchangeProblem some = problem_of(ranks, 8, 2, 64, 70);
    some.tokens = {0, 70, 1};
    for (const ExchangeProblem& problem : {problem_of(ranks, 16, 4, 264, 77), some}) {
      SCOPED_TRACE(problem.name);
      run_ranks(
          ranks, [&](Communicator& comm) { run_checks(problem, comm, GetParam()); }, seconds(60));
    }
  }
}

TEST_P(NcclExchange, IsCapturedInAGraphAndReplayedWithOtherRouting) {
  if (!may_be_captured()) GTEST_SKIP() << "counts are read on the host";
  const ExchangeProblem problem = problem_of(most_ranks(), 16, 4, 256, 60);
  run_ranks(
      most_ranks(),
      [&](Communicator& comm) {
        DeviceChecker checker(problem, comm, GetParam().mode, seconds(20), GetParam().engine);
        replay_twice_in_a_graph(checker, comm, 50);
        for (int epoch = 0; epoch < 2; ++epoch) checker.run(epoch);
      },
      seconds(60));
}

TEST_P(NcclExchange, ARankThatDoesNotComeIsNamedAndAfterRecoverAllIsRight) {
  const int ranks = most_ranks();
  const ExchangeProblem problem = problem_of(ranks, 9, 2, 64, 20);
  run_ranks(
      ranks,
      [&](Communicator& comm) {
        DeviceChecker checker(problem, comm, GetParam().mode, milliseconds(500), GetParam().engine);
        checker.run(0);
        checker.set_input(1);
        comm.barrier("ready");
        if (comm.rank() != 1) {
          try {
            checker.dispatch();
            checker.synchronize();
            ADD_FAILURE() << "no error";
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
            // A send or receive does not say whose it is.
            const bool by_stores = GetParam().engine == DeviceEngine::kNccl;
            const char* const words = by_stores ? "waiting for rank 1" : "rank";
            EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
          }
        }
        comm.barrier("seen");
        checker.device_exchange().recover();
        for (int epoch = 0; epoch < 3; ++epoch) checker.run(epoch);
      },
      seconds(60));
}

INSTANTIATE_TEST_SUITE_P(Ways, NcclExchange, testing::ValuesIn(kWays), [](const auto& way) {
  return fmt::format("{}{}", way.param.engine == DeviceEngine::kNccl ? "Windows" : "Pairs",
                     way.param.mode == ExchangeMode::kThroughput ? "Throughput" : "LowLatency");
});

/// What else a transfer has: scales on the wire, dropped assignments, several chunks.
TEST(NcclPairsOnly, ScalesDropsAndChunksAreRight) {
  if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  const int ranks = std::min(most_ranks(), 4);
  ExchangeProblem fp8 = problem_of(ranks, 9, 3, 2200, 21);
  fp8.config.dispatch_wire = DType::kF8E4M3;
  fp8.config.combine_wire = DType::kF8E4M3;
  ExchangeProblem unused = problem_of(ranks, 8, 4, 128, 50);
  unused.routing = ExchangeProblem::Routing::kUnused;
  unused.drop_some = true;
  ExchangeProblem chunks = problem_of(ranks, 32, 8, 512, 700);
  for (const ExchangeMode mode : {ExchangeMode::kThroughput, ExchangeMode::kLowLatency}) {
    for (const ExchangeProblem& problem : {fp8, unused, chunks}) {
      SCOPED_TRACE(problem.name);
      run_ranks(
          ranks,
          [&](Communicator& comm) {
            run_checks(problem, comm, {DeviceEngine::kNcclPairs, mode});
          },
          seconds(60));
    }
  }
}

TEST(NcclPairsOnly, AGraphWithCountsReadOnTheHostIsRefusedInWords) {
  if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  const ExchangeProblem problem = problem_of(2, 9, 2, 64, 20);
  run_ranks(2, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, ExchangeMode::kThroughput, seconds(5),
                          DeviceEngine::kNcclPairs);
    checker.set_input(0);
    cudaGraph_t graph = nullptr;
    SWITCHYARD_CUDA(cudaStreamBeginCapture(checker.stream(), cudaStreamCaptureModeThreadLocal));
    try {
      checker.dispatch();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    }
    SWITCHYARD_CUDA(cudaStreamEndCapture(checker.stream(), &graph));
    cudaGraphDestroy(graph);
    for (int epoch = 0; epoch < 2; ++epoch) checker.run(epoch);
  });
}

TEST(NcclWindowsOnly, RanksThatShareAGpuAreRefusedInWords) {
  if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  const ExchangeProblem problem = problem_of(2, 9, 2, 64, 20);
  try {
    run_ranks(2, [&](Communicator& comm) {
      const DeviceExpertParallel exchange(comm, problem.config,
                                          {.device = 0, .engine = DeviceEngine::kNccl, .ctas = 4});
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("one rank a GPU"), std::string::npos) << error.what();
  }
}

/// Set in the processes that the next test starts.
constexpr const char* kRankOfTest = "SWITCHYARD_TEST_NCCL_RANK";

TEST(NcclProcesses, GiveTheBitsOfTheHost) {
  if (const char* rank = std::getenv(kRankOfTest); rank != nullptr) {
    const auto comm = make_launched_rank();
    comm->set_timeout(seconds(30));
    const ExchangeProblem problem = problem_of(comm->size(), 16, 4, 264, 77);
    for (const Way& way : kWays) run_checks(problem, *comm, way);
    comm->barrier("end");
    return;
  }
  if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  const std::string world = fmt::format("{}", most_ranks());
  const std::string job = fmt::format("nccl-test-{}", getpid());
  std::vector<pid_t> children;
  for (int rank = 0; rank < most_ranks(); ++rank) {
    const std::string number = fmt::format("{}", rank);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {  // CUDA does not live through a fork: the program starts anew
      setenv(kRankOfTest, number.c_str(), 1);
      setenv("RANK", number.c_str(), 1);
      setenv("LOCAL_RANK", number.c_str(), 1);
      setenv("WORLD_SIZE", world.c_str(), 1);
      setenv("LOCAL_WORLD_SIZE", world.c_str(), 1);
      setenv("MASTER_PORT", "1", 1);
      setenv("TORCHELASTIC_RUN_ID", job.c_str(), 1);
      execl("/proc/self/exe", "nccl_exchange_test",
            "--gtest_filter=NcclProcesses.GiveTheBitsOfTheHost", nullptr);
      _exit(127);
    }
    children.push_back(child);
  }
  test::expect_success(children);
}

/// Goes as far with the others as they need it before NCCL starts, and leaves.
void leave_before_nccl_starts(Communicator& comm) {
  require_no_trouble(comm, ErrorCode::kUnsupported, nccl_windows_missing());
  const auto window = comm.create_window(128, 1);  // an NCCL unique id
  window->wait(0, 1, {.phase = "test", .rank = 0});
  comm.barrier("test");
}

TEST(NcclWindowsOnly, ARankThatLeavesBeforeNcclStartsIsATimeout) {
  if (const std::string reason = reason_to_skip(); !reason.empty()) GTEST_SKIP() << reason;
  const auto start = std::chrono::steady_clock::now();
  run_ranks(
      2,
      [&](Communicator& comm) {
        if (comm.rank() == 1) return leave_before_nccl_starts(comm);
        SWITCHYARD_CUDA(cudaSetDevice(0));
        try {
          const NcclWindows windows(comm, 4096);
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
        }
      },
      milliseconds(3000));
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
}

}  // namespace
}  // namespace switchyard
