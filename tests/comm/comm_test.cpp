#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/ranks/agreement.hpp"
#include "comm/ranks/topology.hpp"
#include "switchyard/error.hpp"
#include "testkit/rank_harness.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// The message of the Error of `code` that `body` throws; "" if it throws none.
template <typename Body>
std::string error_of(ErrorCode code, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Ranks, EachKnowsItsRankAndTheirNumber) {
  for (const int num_ranks : {1, 2, 3, 4, 8}) {
    if (!has_ranks(num_ranks)) continue;
    on_ranks(num_ranks, [&](Communicator& comm) {
      EXPECT_EQ(comm.size(), num_ranks);
      EXPECT_GE(comm.rank(), 0);
      EXPECT_LT(comm.rank(), num_ranks);
      comm.barrier("start");
    });
  }
}

TEST(Ranks, OfOneHostAreOnOneNodeAndInOneDomain) {
  for (const int num_ranks : {1, 3, 4}) {
    on_ranks(num_ranks, [&](Communicator& comm) {
      const Topology& topology = comm.topology();
      const std::vector<std::int32_t> zeros(static_cast<std::size_t>(num_ranks), 0);
      EXPECT_EQ(topology.node, zeros);
      EXPECT_EQ(topology.domain, zeros);
      ASSERT_EQ(topology.num_nodes(), 1);
      EXPECT_NE(topology.name[0], "");
      const int last = num_ranks - 1;
      EXPECT_EQ(topology.place_of(last),
                "rank " + std::to_string(last) + " on node 0 (" + topology.name[0] + ")");
      comm.barrier("end");
    });
  }
}

TEST(Ranks, NodesAreNumberedByTheirLowestRanks) {
  // Ranks in turns over two hosts, and one on a third: its ranks come last.
  const int first_of_host[] = {0, 1, 0, 1, 4, 0};
  const Topology topology = topology_of_hosts(first_of_host, {"b", "a", "b", "a", "c", "b"});
  const std::vector<std::int32_t> nodes = {0, 1, 0, 1, 2, 0};
  EXPECT_EQ(topology.node, nodes);
  EXPECT_EQ(topology.domain, nodes);
  EXPECT_EQ(topology.name, (std::vector<std::string>{"b", "a", "c"}));
  EXPECT_EQ(topology.place_of(4), "rank 4 on node 2 (c)");
}

TEST(Ranks, AnImpossibleNumberOfRanksIsRefused) {
  EXPECT_TRUE(has(error_of(ErrorCode::kInvalidArgument, [] { make_thread_ranks(0); }),
                  "number of ranks is 0, want 1 to 64"));
  EXPECT_TRUE(has(error_of(ErrorCode::kInvalidArgument, [] { make_thread_ranks(65); }), "65"));
}

TEST(Ranks, OneRankAloneWaitsForNobody) {
  const auto comm = make_single_rank();
  EXPECT_EQ(comm->size(), 1);
  comm->barrier("start");
  const auto window = comm->create_window(64, 1);
  const int value = 7;
  window->put(0, 8, &value, sizeof(value));
  window->signal(0, 0, 3);
  EXPECT_EQ(window->wait(0, 2, {.phase = "test", .rank = 0}), 3U);
  EXPECT_EQ(std::memcmp(window->local() + 8, &value, sizeof(value)), 0);
}

TEST(Window, StartsZeroedAndAligned) {
  on_ranks(3, [](Communicator& comm) {
    const auto window = comm.create_window(1000, 2);
    EXPECT_EQ(window->bytes(), 1000U);
    EXPECT_EQ(window->num_signals(), 2);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(window->local()) % 128, 0U);
    for (std::size_t i = 0; i < 1000; ++i) ASSERT_EQ(window->local()[i], std::byte{0});
    EXPECT_EQ(window->wait(1, 0, {.phase = "nothing", .rank = 0}), 0U);
    comm.barrier("end");
  });
}

TEST(Window, WhatWasPutBeforeASignalIsThereAfterTheWait) {
  constexpr std::size_t kBlock = 4096;
  for (const int num_ranks : {1, 2, 3, 4, 8}) {
    if (!has_ranks(num_ranks)) continue;
    on_ranks(num_ranks, [&](Communicator& comm) {
      const auto n = static_cast<std::size_t>(num_ranks);
      const auto window = comm.create_window(2 * n * kBlock, num_ranks);
      std::string block(kBlock, ' ');
      for (std::uint64_t epoch = 1; epoch <= 50; ++epoch) {
        const std::size_t buffer = epoch % 2 * n * kBlock;  // a rank may be one epoch ahead
        for (int to = 0; to < num_ranks; ++to) {
          block.assign(kBlock, static_cast<char>(epoch + 7 * static_cast<std::uint64_t>(to)));
          window->put(to, buffer + static_cast<std::size_t>(comm.rank()) * kBlock, block.data(),
                      kBlock);
          window->signal(to, comm.rank(), epoch);
        }
        for (int from = 0; from < num_ranks; ++from) {
          window->wait(from, epoch, {.phase = "block", .rank = from});
          block.assign(kBlock,
                       static_cast<char>(epoch + 7 * static_cast<std::uint64_t>(comm.rank())));
          const std::byte* seen =
              window->local() + buffer + static_cast<std::size_t>(from) * kBlock;
          ASSERT_EQ(std::memcmp(seen, block.data(), kBlock), 0) << "epoch " << epoch;
        }
      }
      comm.barrier("end");
    });
  }
}

TEST(Window, DirectWritesAreVisibleLikePuts) {
  on_ranks(2, [](Communicator& comm) {
    const auto window = comm.create_window(256, 1);
    const int other = 1 - comm.rank();
    const char letter = static_cast<char>('a' + comm.rank());
    if (std::byte* peer = window->peer(other)) {
      std::memset(peer, letter, 256);
    } else {
      const std::string text(256, letter);
      window->put(other, 0, text.data(), 256);
    }
    window->signal(other, 0, 1);
    window->wait(0, 1, {.phase = "letter", .rank = other});
    EXPECT_EQ(window->local()[255], static_cast<std::byte>('a' + other));
    comm.barrier("end");
  });
}

TEST(Window, APutBeyondItsEndIsRefused) {
  const auto comm = make_single_rank();
  const auto window = comm->create_window(16, 0);
  const char bytes[17] = {};
  EXPECT_TRUE(has(error_of(ErrorCode::kInvalidArgument, [&] { window->put(0, 0, bytes, 17); }),
                  "exceeds the window's 16"));
  EXPECT_NE(error_of(ErrorCode::kInvalidArgument, [&] { window->put(0, 17, bytes, 0); }), "");
}

TEST(Window, RanksThatAskForDifferentSizesAreEachToldWhose) {
  on_ranks(3, [](Communicator& comm) {
    const std::string error = error_of(ErrorCode::kCommunication,
                                       [&] { comm.create_window(comm.rank() == 1 ? 128 : 64, 2); });
    EXPECT_TRUE(has(error, "128")) << error;
    EXPECT_TRUE(has(error, "64")) << error;
    const auto window = comm.create_window(64, 1);  // and the next one works
    comm.barrier("end");
  });
}

TEST(Agreement, EachRankIsToldWhichValueDiffersAndWhose) {
  on_ranks(3, [](Communicator& comm) {
    const AgreedValue values[] = {{"hidden", 64}, {"top_k", comm.rank() == 2 ? 4 : 2}};
    const std::string error =
        error_of(ErrorCode::kCommunication, [&] { require_agreement(comm, values); });
    if (comm.rank() == 2) {
      EXPECT_TRUE(has(error, "rank 0 has top_k=2, rank 2 (here) has 4; rank 1 has")) << error;
    } else {
      EXPECT_TRUE(has(error, "rank 2 has top_k=4, rank " + std::to_string(comm.rank()))) << error;
    }
    EXPECT_FALSE(has(error, "hidden")) << error;
    const AgreedValue same[] = {{"hidden", 64}};
    require_agreement(comm, same);
  });
}

TEST(Agreement, AStepThatFailsOnOneRankFailsOnAllWithItsWords) {
  on_ranks(3, [](Communicator& comm) {
    const std::string trouble = comm.rank() == 1 ? "no library" + std::string(300, '!') : "";
    const std::string error = error_of(ErrorCode::kUnsupported, [&] {
      require_no_trouble(comm, ErrorCode::kUnsupported, trouble);
    });
    EXPECT_TRUE(has(error, comm.rank() == 1 ? "no library!" : "rank 1: no library!")) << error;
    require_no_trouble(comm, ErrorCode::kUnsupported, "");
  });
}

TEST(Deadline, TheWaitNamesPhaseRankExpectedAndSeenAndTheOthersLeaveToo) {
  on_ranks(3, [](Communicator& comm) {
    comm.set_timeout(milliseconds(comm.rank() == 0 ? 100 : 20000));
    const auto window = comm.create_window(64, 3);
    window->signal(0, 2, 4);
    const auto start = Clock::now();
    const std::string error =
        error_of(ErrorCode::kTimeout, [&] { window->wait(2, 5, {.phase = "rows", .rank = 2}); });
    EXPECT_LT(Clock::now() - start, milliseconds(5000));
    EXPECT_TRUE(has(error, "rows: waiting for rank 2, expected 5, seen ")) << error;
    if (comm.rank() == 0) {
      EXPECT_TRUE(has(error, "seen 4 after 100 ms")) << error;
    } else {
      EXPECT_TRUE(has(error, "left because rank 0 waited 100 ms: rows")) << error;
    }
    comm.set_timeout(milliseconds(20000));
    comm.recover();
  });
}

TEST(Deadline, ABarrierNamesTheRankThatIsMissing) {
  on_ranks(3, [](Communicator& comm) {
    comm.set_timeout(milliseconds(100));
    if (comm.rank() != 1) {
      const std::string error = error_of(ErrorCode::kTimeout, [&] { comm.barrier("layer"); });
      EXPECT_TRUE(has(error, "layer: waiting for rank 1")) << error;
    } else {
      std::this_thread::sleep_for(milliseconds(400));
    }
    comm.set_timeout(milliseconds(20000));
    comm.recover();
  });
}

TEST(Recover, MakesSignalsZeroAndTheSameWindowUsableAgain) {
  on_ranks(4, [](Communicator& comm) {
    const auto window = comm.create_window(64, 4);
    for (std::uint64_t round = 0; round < 5; ++round) {
      EXPECT_EQ(comm.recoveries(), round);
      window->signal((comm.rank() + 1) % 4, comm.rank(), 9);
      if (comm.rank() == 3) {
        comm.give_up("rank 3 has had enough");
      } else {
        const std::string error = error_of(ErrorCode::kTimeout, [&] { comm.barrier("never"); });
        EXPECT_TRUE(has(error, "rank 3 has had enough")) << error;
      }
      comm.recover();
      const int before = (comm.rank() + 3) % 4;
      EXPECT_EQ(window->wait(before, 0, {.phase = "zero", .rank = before}), 0U);
      comm.barrier("seen");
      window->signal((comm.rank() + 1) % 4, comm.rank(), round + 1);
      EXPECT_EQ(window->wait(before, round + 1, {.phase = "after", .rank = before}), round + 1);
      comm.barrier("round");
    }
  });
}

TEST(Recover, EndsInATimeoutWhenARankDoesNotComeAndCanBeTriedAgain) {
  on_ranks(3, [](Communicator& comm) {
    comm.barrier("start");
    comm.set_timeout(milliseconds(100));
    comm.give_up("test");
    if (comm.rank() != 2) {
      const std::string error = error_of(ErrorCode::kTimeout, [&] { comm.recover(); });
      EXPECT_TRUE(has(error, "recover: waiting for rank")) << error;
    } else {
      std::this_thread::sleep_for(milliseconds(600));  // longer than the others wait
    }
    comm.set_timeout(milliseconds(20000));
    comm.recover();
    comm.barrier("again");
  });
}

TEST(RunRanks, TheErrorThatMadeTheOthersLeaveIsTheOneThrown) {
  const auto start = Clock::now();
  const std::string error = [&] {
    try {
      run_ranks(4, [](Communicator& comm) {
        if (comm.rank() == 2) throw std::runtime_error("disk on fire");
        comm.barrier("never");
      });
    } catch (const std::runtime_error& e) {
      return std::string(e.what());
    }
    return std::string();
  }();
  EXPECT_EQ(error, "disk on fire");
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
}

TEST(RunRanks, WhereAllTimeOutTheMessageHasTheFirstDeadlineMissed) {
  const std::string error = error_of(ErrorCode::kTimeout, [] {
    run_ranks(
        3,
        [](Communicator& comm) {
          if (comm.rank() != 0) comm.barrier("never");
        },
        milliseconds(100));
  });
  EXPECT_TRUE(has(error, "never: waiting for rank 0, expected 1, seen 0")) << error;
}

}  // namespace
}  // namespace switchyard
