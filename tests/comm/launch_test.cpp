#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "comm/ranks/launch.hpp"
#include "comm/ranks/process_ranks.hpp"
#include "comm/ranks/shared_ranks.hpp"
#include "comm/ranks/unique_id.hpp"
#include "core/check.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/processes.hpp"

namespace switchyard {
namespace {

/// Environment variables for the time of a test.
class Variables {
 public:
  explicit Variables(const std::vector<std::pair<const char*, std::string>>& values) {
    for (const auto& [name, value] : values) {
      setenv(name, value.c_str(), 1);
      names_.push_back(name);
    }
  }
  ~Variables() {
    for (const char* name : names_) unsetenv(name);
  }

 private:
  std::vector<const char*> names_;
};

TEST(Launch, WithoutALauncherThereIsOneRank) {
  const Launch launch = read_launch();
  EXPECT_EQ(launch.launcher, "");
  EXPECT_EQ(launch.world, 1);
  EXPECT_EQ(make_launched_rank(), nullptr);
}

TEST(Launch, EachLaunchersVariablesAreUnderstood) {
  {
    const Variables set({{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
    const Launch launch = read_launch();
    EXPECT_EQ(launch.launcher, "mpirun");
    EXPECT_EQ(launch.rank, 2);
    EXPECT_EQ(launch.world, 4);
    EXPECT_EQ(launch.local_rank, 1);
    EXPECT_EQ(launch.local_world, 2);
  }
  {
    const Variables set({{"SLURM_PROCID", "3"},
                         {"SLURM_STEP_NUM_TASKS", "8"},
                         {"SLURM_LOCALID", "3"},
                         {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}});
    const Launch launch = read_launch();
    EXPECT_EQ(launch.launcher, "srun");
    EXPECT_EQ(launch.world, 8);
    EXPECT_EQ(launch.local_world, 4);
  }
  const Variables set({{"RANK", "0"},
                       {"WORLD_SIZE", "2"},
                       {"LOCAL_RANK", "0"},
                       {"LOCAL_WORLD_SIZE", "2"},
                       {"MASTER_ADDR", "localhost"},
                       {"MASTER_PORT", "29500"}});
  const Launch launch = read_launch();
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.master_port, 29500);
}

TEST(Launch, AVariableThatIsNoNumberIsNamed) {
  const Variables set({{"RANK", "one"}, {"WORLD_SIZE", "2"}});
  test::expect_error(ErrorCode::kInvalidArgument, "RANK='one'",
                     [] { static_cast<void>(read_launch()); });
}

TEST(Launch, ARankBeyondTheWorldIsRefused) {
  const Variables set({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
  EXPECT_THROW((void)read_launch(), Error);
}

TEST(Launch, TorchrunOverSeveralHostsIsRefusedWithWhatWouldWork) {
  const Variables set({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}});
  test::expect_error(ErrorCode::kUnsupported, "mpirun or srun",
                     [] { static_cast<void>(make_launched_rank()); });
}

/// What each of three processes does; the exit status is 0 if all is right.
int exchange_as_process(const char* rank_variable, int rank) {
  setenv(rank_variable, std::to_string(rank).c_str(), 1);
  try {
    auto comm = make_launched_rank();
    // Meetings follow each other at once; the last rank is not in all of them.
    for (int again = 0; again < 20; ++again) {
      const auto two = make_launched_rank(2);
      if ((two == nullptr) != (rank == 2)) return 4;
      comm = make_launched_rank();
    }
    if (comm->rank() != rank || comm->size() != 3) return 2;
    const auto window = comm->create_window(64, 3);
    for (int to = 0; to < 3; ++to) {
      window->put(to, static_cast<std::size_t>(rank) * 4, &rank, 4);
      window->signal(to, rank, 1);
    }
    for (int from = 0; from < 3; ++from) {
      window->wait(from, 1, {.phase = "test", .rank = from});
      if (reinterpret_cast<const int*>(window->local())[from] != from) return 3;
    }
    comm->barrier("end");
    return 0;
  } catch (const std::exception& error) {
    fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
}

/// The launcher's other variables are set.
void expect_three_processes_meet(const char* rank_variable) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < 3; ++rank) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(exchange_as_process(rank_variable, rank));
    children.push_back(child);
  }
  test::expect_success(children);
}

TEST(Launch, ProcessesOfTorchrunMeetAndExchange) {
  const Variables set({{"WORLD_SIZE", "3"},
                       {"LOCAL_WORLD_SIZE", "3"},
                       {"MASTER_PORT", "1"},
                       {"TORCHELASTIC_RUN_ID", "test/" + std::to_string(getpid())}});
  expect_three_processes_meet("RANK");
}

TEST(Launch, ProcessesWithAnAddressAndAPortAloneMeetAndExchange) {
  const Variables set({{"WORLD_SIZE", "3"},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", std::to_string(getpid())}});
  expect_three_processes_meet("RANK");
}

TEST(Launch, ProcessesOfSrunOnOneHostMeetAndExchangeStepByStep) {
  for (const char* step : {"0", "1"}) {
    const Variables set({{"SLURM_STEP_NUM_TASKS", "3"},
                         {"SLURM_STEP_TASKS_PER_NODE", "3"},
                         {"SLURM_JOB_ID", std::to_string(getpid())},
                         {"SLURM_STEP_ID", step}});
    expect_three_processes_meet("SLURM_PROCID");
  }
}

/// The number of a process that was there.
std::uint64_t ended_process(bool its_parent_knows) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t status{};
  waitid(P_PID, static_cast<id_t>(child), &status, WEXITED | (its_parent_knows ? 0 : WNOWAIT));
  return static_cast<std::uint64_t>(child);
}

/// What rank 0 says of a window whose other part is of a process that ended before it was opened:
/// the test does what rank 1 had done until then.
std::string window_of_an_ended_process(bool its_parent_knows) {
  ControlBlock* control = nullptr;
  const auto tell = [&](std::array<std::uint64_t, 2> words, Deadline) {
    void* pages = mmap(nullptr, sizeof(ControlBlock), PROT_READ | PROT_WRITE, MAP_SHARED,
                       static_cast<int>(words[1]), 0);
    control = static_cast<ControlBlock*>(pages);
    const std::uint64_t offer[] = {64, 1, ended_process(its_parent_knows), 3};
    for (std::size_t i = 0; i < 4; ++i) control->offer[1][i] = offer[i];
    control->arrived[1] = 2;  // at the start, and at the window
    return words;
  };
  const auto rank_0 = make_process_rank(0, 2, "test", tell);
  rank_0->set_timeout(std::chrono::minutes(10));  // nobody waits for the deadline
  std::string said;
  try {
    static_cast<void>(rank_0->create_window(64, 1));
  } catch (const Error& error) {
    said = fmt::format("{}: {}", to_string(error.code()), error.what());
  }
  EXPECT_EQ(control->failed.load(), 2U) << "the others are not told";
  munmap(control, sizeof(ControlBlock));
  return said;
}

TEST(ProcessRanks, OneThatHasEndedBeforeItsMemoryWasOpenedIsNamed) {
  for (const bool its_parent_knows : {true, false}) {
    const std::string said = window_of_an_ended_process(its_parent_knows);
    EXPECT_NE(said.find("waiting for rank 1"), std::string::npos) << said;
    EXPECT_EQ(said.rfind(to_string(ErrorCode::kTimeout), 0), 0U) << said;
  }
  test::expect_error(ErrorCode::kTimeout, "waiting for rank 0", [] {
    static_cast<void>(make_process_rank(1, 2, "test", [](auto, Deadline) {
      return std::array<std::uint64_t, 2>{ended_process(true), 3};
    }));
  });
}

TEST(UniqueId, AFileGivesAllRanksTheSameAndThatOfARunningProcessIsRefused) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("id-test-{}", getpid());
  std::ofstream(path) << std::string(32, 'a') << " 999999999\n";  // left behind
  std::string of_rank_1;
  std::thread rank_1(
      [&] { of_rank_1 = unique_id_by_file(path, 1, deadline_after(std::chrono::seconds(20))); });
  const std::string id = unique_id_by_file(path, 0, deadline_after(std::chrono::seconds(20)));
  rank_1.join();
  EXPECT_EQ(of_rank_1, id);
  EXPECT_TRUE(is_unique_id(id));
  test::expect_error(ErrorCode::kInvalidArgument, "still runs", [&] {
    static_cast<void>(unique_id_by_file(path, 0, deadline_after(std::chrono::seconds(20))));
  });
  std::filesystem::remove(path);
  test::expect_error(ErrorCode::kTimeout, "waiting for rank 0", [&] {
    static_cast<void>(unique_id_by_file(path, 1, deadline_after(std::chrono::milliseconds(20))));
  });
}

TEST(UniqueId, APipeIsRefusedAndOfALargeFileOnlyTheStartIsRead) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("id-odd-{}", getpid());
  const auto ask = [&](int rank) {
    return unique_id_by_file(path, rank, deadline_after(std::chrono::milliseconds(20)));
  };
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  for (const int rank : {0, 1}) {
    test::expect_error(ErrorCode::kInvalidArgument, "is not a regular file",
                       [&] { static_cast<void>(ask(rank)); });
  }
  std::filesystem::remove(path);
  std::ofstream(path) << 'a';
  std::filesystem::resize_file(path, std::uintmax_t{1} << 40);  // one word of a TiB, if it is read
  test::expect_error(ErrorCode::kTimeout, "waiting for rank 0", [&] { static_cast<void>(ask(1)); });
  std::filesystem::remove(path);
}

TEST(Launch, EveryEngineIsListedWithWhatIsMissing) {
  const std::vector<EngineInfo> list = engines();
  ASSERT_EQ(list.size(), 4U);
  EXPECT_EQ(list[0].name, "threads");
  EXPECT_EQ(list[0].missing, "");
  EXPECT_EQ(list[1].name, "mpi");
  EXPECT_EQ(list[2].name, "nccl");
  EXPECT_EQ(list[3].name, "nccl-pairs");
}

}  // namespace
}  // namespace switchyard
