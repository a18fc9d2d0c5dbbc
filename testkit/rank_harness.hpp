#pragma once

// Runs a test's body on R ranks of the engine under test. Bodies work from seeds alone: a rank
// regenerates what the others have, so that the same test runs on threads and on processes.

#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>

#include "switchyard/comm.hpp"
#if SWITCHYARD_TEST_MPI
#include "switchyard/mpi.hpp"
#endif

namespace switchyard {

using RankBody = std::function<void(Communicator&)>;

#if SWITCHYARD_TEST_MPI

/// False where the engine under test has no R ranks: the test is skipped.
inline bool has_ranks(int num_ranks) { return num_ranks <= 4; }

inline std::unique_ptr<Communicator> make_test_rank(int num_ranks) {
  const char* name = std::getenv("SWITCHYARD_TEST_TRANSPORT");
  const bool messages = name != nullptr && std::string_view(name) == "messages";
  return make_mpi_rank(num_ranks, messages ? MpiTransport::kMessages : MpiTransport::kShared);
}

/// Every process runs the body, as one of the first R of them; the others go on.
inline void on_ranks(int num_ranks, const RankBody& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  if (!has_ranks(num_ranks)) return;
  const auto comm = make_test_rank(num_ranks);
  if (!comm) return;
  comm->set_timeout(timeout);
  try {
    body(*comm);
  } catch (const std::exception& error) {
    comm->give_up(error.what());
    throw;
  }
}

/// The same with a second communicator of the same ranks.
inline void on_ranks_with_two(int num_ranks,
                              const std::function<void(Communicator&, Communicator&)>& body) {
  if (!has_ranks(num_ranks)) return;
  const auto second = make_test_rank(num_ranks);
  on_ranks(num_ranks, [&](Communicator& first) { body(first, *second); });
}

#else

inline bool has_ranks(int num_ranks) { return num_ranks <= 64; }

inline void on_ranks(int num_ranks, const RankBody& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  run_ranks(num_ranks, body, timeout);
}

inline void on_ranks_with_two(int num_ranks,
                              const std::function<void(Communicator&, Communicator&)>& body) {
  const auto second = make_thread_ranks(num_ranks);
  on_ranks(num_ranks, [&](Communicator& first) {
    body(first, *second[static_cast<std::size_t>(first.rank())]);
  });
}

#endif

}  // namespace switchyard
