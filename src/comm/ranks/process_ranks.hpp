#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>

#include "comm/ranks/deadline.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

/// Tells all ranks two words of rank 0, collectively, once: how processes find each other at first.
/// @throws Error{kTimeout} past the deadline.
using TellAll = std::function<std::array<std::uint64_t, 2>(std::array<std::uint64_t, 2>, Deadline)>;

/// Ranks that are processes of one host and one user: windows are anonymous shared memory, opened
/// through /proc, so that nothing is left behind when a process dies.
/// @throws Error{kCommunication} if another's memory cannot be opened; {kTimeout} that names a rank
///         whose process has ended before it was, and all others leave for it; {kOutOfMemory}.
std::unique_ptr<Communicator> make_process_rank(int rank, int num_ranks, const char* engine,
                                                const TellAll& tell_all);

/// Tells by a file, written by rank 0 and removed by it once all have read it; `key` names the job.
[[nodiscard]] TellAll tell_by_file(int rank, int num_ranks, const std::string& key);

}  // namespace switchyard
