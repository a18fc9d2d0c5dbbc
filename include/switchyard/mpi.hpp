#pragma once

#include <cstdint>
#include <memory>

#include "switchyard/comm.hpp"

namespace switchyard {

/// How the bytes move between MPI ranks.
enum class MpiTransport : std::uint8_t {
  kAuto,      ///< Shared memory where all ranks are on one host, messages otherwise.
  kShared,    ///< Shared memory; kUnsupported if ranks are on several hosts.
  kMessages,  ///< Nonblocking, polled MPI messages.
};

/// Engine "mpi": this process's rank among those that mpirun or srun has started. Collective over
/// the world. The first call starts MPI unless the program has; MPI then ends with the process.
///
/// @param num_ranks  The first so many processes take part, 0: all. The others get null.
/// @throws Error{kInvalidArgument}: more ranks than processes, or more than 64; {kTimeout}: a
///         process does not come within 60 s; {kUnsupported}.
/// One thread at a time may use the communicators of a process.
std::unique_ptr<Communicator> make_mpi_rank(int num_ranks = 0,
                                            MpiTransport transport = MpiTransport::kAuto);

}  // namespace switchyard
