#pragma once

// Runs a test's body on R ranks of the engine under test. Bodies work from seeds alone: a rank
// regenerates what the others have, so that the same test runs on threads and on processes.

#include <chrono>
#include <functional>

#include "switchyard/comm.hpp"

namespace switchyard {

using RankBody = std::function<void(Communicator&)>;

/// False where the engine under test has no R ranks: the test is skipped.
inline bool has_ranks(int num_ranks) { return num_ranks <= 64; }

inline void on_ranks(int num_ranks, const RankBody& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  run_ranks(num_ranks, body, timeout);
}

}  // namespace switchyard
