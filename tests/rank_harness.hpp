#pragma once

// Runs a test's body on R ranks of the engine under test. Bodies work from seeds alone: a rank
// regenerates what the others have, so that the same test runs on threads and on processes.

#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
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

/// Every process runs the body, as one of the first R of them; the others go on.
inline void on_ranks(int num_ranks, const RankBody& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  if (!has_ranks(num_ranks)) return;
  const char* name = std::getenv("SWITCHYARD_TEST_TRANSPORT");
  const bool messages = name != nullptr && std::string_view(name) == "messages";
  const auto comm =
      make_mpi_rank(num_ranks, messages ? MpiTransport::kMessages : MpiTransport::kShared);
  if (!comm) return;
  comm->set_timeout(timeout);
  try {
    body(*comm);
  } catch (const std::exception& error) {
    comm->give_up(error.what());
    throw;
  }
}

#else

inline bool has_ranks(int num_ranks) { return num_ranks <= 64; }

inline void on_ranks(int num_ranks, const RankBody& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  run_ranks(num_ranks, body, timeout);
}

#endif

}  // namespace switchyard
