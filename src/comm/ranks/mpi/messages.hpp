#pragma once

#include <mpi.h>

#include <memory>

#include "switchyard/comm.hpp"

namespace switchyard {

/// A rank whose puts and signals are MPI messages: works over hosts. Takes `communicator`, which
/// must be used by nobody else. All calls are nonblocking and polled.
std::unique_ptr<Communicator> make_message_rank(MPI_Comm communicator, Topology topology);

/// Throws Error{kCommunication} with MPI's own words.
void check_mpi(int status, const char* call);

}  // namespace switchyard
