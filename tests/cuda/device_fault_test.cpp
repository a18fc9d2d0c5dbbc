// Faults between GPUs: a rank that is late, a count that is damaged on its way, a process that is
// killed. Ranks are threads that share the GPUs there are; processes have one each.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "comm/device/setup.hpp"
#include "comm/ranks/launch.hpp"
#include "switchyard/error.hpp"
#include "testkit/gpu/device_checker.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kDeadline{400};

/// What `body` ends with: a timeout within the deadline, and as much again for a busy machine.
std::string expect_timeout(const std::function<void()>& body) {
  const auto start = Clock::now();
  try {
    body();
    ADD_FAILURE() << "no error";
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
    EXPECT_LT(Clock::now() - start, 2 * kDeadline + seconds(2)) << error.what();
    return error.what();
  }
}

void round_trip(DeviceChecker& checker) {
  checker.combine(checker.dispatch());
  checker.synchronize();
}

class DeviceFault : public testing::TestWithParam<ExchangeMode> {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_P(DeviceFault, ALateRankLeavesWithTheOthersAndAfterRecoverAllIsRight) {
  const ExchangeProblem problem = problem_of(3, 9, 2, 64, 20);
  run_ranks(3, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, GetParam(), kDeadline);
    for (int round = 0; round < 3; ++round) {
      checker.run(3 * round);
      checker.set_input(3 * round + 1);
      comm.barrier("ready");
      if (comm.rank() == 1) std::this_thread::sleep_for(2 * kDeadline);
      const std::string error = expect_timeout([&] { round_trip(checker); });
      if (comm.rank() != 1) {
        EXPECT_NE(error.find("waiting for rank"), std::string::npos) << error;
      }
      checker.device_exchange().recover();
    }
    checker.run(9);
  });
}

TEST_P(DeviceFault, ADamagedCountIsATimeoutThatNamesItsRankAndAfterRecoverAllIsRight) {
  const ExchangeProblem problem = problem_of(3, 9, 2, 64, 20);
  const ExchangeLayout layout = layout_of(problem.config, {.mode = GetParam()}, 3);
  std::array<std::byte*, 3> windows{};
  run_ranks(3, [&](Communicator& comm) {
    DeviceChecker checker(problem, comm, GetParam(), kDeadline);
    checker.run(0);
    checker.set_input(1);
    const DeviceReceived received = checker.dispatch();
    checker.combine(received);
    checker.synchronize();
    constexpr std::uint64_t kEpoch = 2;  // of that dispatch
    windows[static_cast<std::size_t>(comm.rank())] =
        const_cast<std::byte*>(received.x.data) - layout.row(layout.buffer_in_turn(kEpoch), 0);
    comm.barrier("windows are known");
    if (comm.rank() == 1) {  // a message of the next epoch with more rows than there can be
      constexpr std::uint64_t kNext = kEpoch + 1;
      constexpr std::uint64_t kFlag = 4 * kNext;  // in low latency each of 4 blocks adds to it
      const std::uint64_t message[] = {kNext, 1, 21, 1, ~kNext};
      for (const int to : {0, 2}) {
        std::byte* const window = windows[static_cast<std::size_t>(to)];
        SWITCHYARD_CUDA(cudaMemcpy(window + layout.counts(layout.buffer_in_turn(kNext), 1), message,
                                   sizeof message, cudaMemcpyDefault));
        SWITCHYARD_CUDA(
            cudaMemcpy(window + layout.counts_flag(1), &kFlag, sizeof kFlag, cudaMemcpyDefault));
      }
    } else {
      const std::string error = expect_timeout([&] {
        checker.dispatch();
        checker.synchronize();
      });
      // The second to see it may be told first that the other has given up.
      if (error.find("another rank gave up") == std::string::npos) {
        EXPECT_NE(error.find("counts: waiting for rank 1, expected 3, seen 21"), std::string::npos)
            << error;
      }
    }
    comm.barrier("seen");
    checker.device_exchange().recover();
    for (int epoch = 0; epoch < 3; ++epoch) checker.run(epoch);
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, DeviceFault,
                         testing::Values(ExchangeMode::kThroughput, ExchangeMode::kLowLatency),
                         [](const auto& mode) {
                           return mode.param == ExchangeMode::kThroughput ? "Throughput"
                                                                          : "LowLatency";
                         });

/// Set in the processes that the next test starts.
constexpr const char* kRankOfTest = "SWITCHYARD_TEST_FAULT_RANK";

/// The last rank is killed after the first exchange; the others' next one, and recover(), end in
/// time.
void be_one_of_several(ExchangeMode mode) {
  const auto comm = make_launched_rank();
  comm->set_timeout(seconds(30));
  const ExchangeProblem problem = problem_of(comm->size(), 16, 4, 264, 77);
  DeviceChecker checker(problem, *comm, mode, kDeadline);
  checker.run(0);
  checker.set_input(1);
  comm->barrier("before the kill");
  if (comm->rank() == comm->size() - 1) std::raise(SIGKILL);
  comm->set_timeout(milliseconds(1000));
  expect_timeout([&] { round_trip(checker); });
  expect_timeout([&] { checker.device_exchange().recover(); });
}

void start_ranks_of_which_one_is_killed(const char* test) {
  const int ranks = std::min(num_devices(), 4);
  const std::string world = fmt::format("{}", ranks);
  const std::string job = fmt::format("fault-test-{}", getpid());
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string number = fmt::format("{}", rank);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {  // CUDA does not live through a fork: the program starts anew
      for (const char* name : {kRankOfTest, "RANK", "LOCAL_RANK"}) setenv(name, number.c_str(), 1);
      for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) setenv(name, world.c_str(), 1);
      setenv("MASTER_PORT", "1", 1);
      setenv("TORCHELASTIC_RUN_ID", job.c_str(), 1);
      const std::string filter = fmt::format("--gtest_filter={}", test);
      execl("/proc/self/exe", "device_fault_test", filter.c_str(), nullptr);
      _exit(127);
    }
    children.push_back(child);
  }
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    if (rank + 1 == children.size()) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
  }
}

void check_kill(ExchangeMode mode, const char* test) {
  if (std::getenv(kRankOfTest) != nullptr) return be_one_of_several(mode);
  if (num_devices() < 2) GTEST_SKIP() << "fewer than two GPUs";
  start_ranks_of_which_one_is_killed(test);
}

TEST(DeviceFaultProcesses, AKilledRankIsATimeoutAndSoIsTheRecovery) {
  check_kill(ExchangeMode::kThroughput,
             "DeviceFaultProcesses.AKilledRankIsATimeoutAndSoIsTheRecovery");
}

TEST(DeviceFaultProcesses, AKilledRankInLowLatencyIsATimeoutAndSoIsTheRecovery) {
  check_kill(ExchangeMode::kLowLatency,
             "DeviceFaultProcesses.AKilledRankInLowLatencyIsATimeoutAndSoIsTheRecovery");
}

}  // namespace
}  // namespace switchyard
