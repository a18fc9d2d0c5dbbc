// Engine "mpi": starts MPI, finds out whether all ranks share a host, and chooses how bytes move.
#include "switchyard/mpi.hpp"

#include <mpi.h>

#include <array>
#include <cstdlib>
#include <thread>

#include "comm/exchange_layout.hpp"
#include "comm/ranks/deadline.hpp"
#include "comm/ranks/mpi/messages.hpp"
#include "comm/ranks/process_ranks.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

/// Starts MPI if nobody has; whoever starts it ends it.
void start_mpi() {
  int started = 0;
  MPI_Initialized(&started);
  if (started != 0) return;
  int provided = 0;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  std::atexit([] {
    int ended = 0;
    MPI_Finalized(&ended);
    if (ended == 0) MPI_Finalize();
  });
}

/// Polls a request: a process that does not come is a timeout.
void complete(MPI_Request& request, Deadline deadline, const char* call) {
  for (int done = 0;;) {
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call);
    if (done != 0) return;
    if (std::chrono::steady_clock::now() >= deadline) {
      fail(ErrorCode::kTimeout, "start: not all processes have come to {}", call);
    }
    std::this_thread::yield();
  }
}

/// Calls that only exist in a blocking form come after this: then all are there.
void meet(MPI_Comm communicator, Deadline deadline) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(communicator, &request), "MPI_Ibarrier");
  complete(request, deadline, "MPI_Ibarrier");
}

bool all_on_one_host(MPI_Comm communicator) {
  MPI_Comm host = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host),
            "MPI_Comm_split_type");
  int here = 0;
  int all = 0;
  MPI_Comm_size(host, &here);
  MPI_Comm_size(communicator, &all);
  MPI_Comm_free(&host);
  return here == all;
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_rank(int num_ranks, MpiTransport transport) {
  start_mpi();
  const Deadline deadline = deadline_after(std::chrono::seconds(60));
  int world = 0;
  int rank = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &world), "MPI_Comm_size");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  if (num_ranks == 0) num_ranks = world;
  require(num_ranks >= 1 && num_ranks <= world && num_ranks <= kMaxRanks,
          "number of ranks is {}, want 1 to {}: the launcher has started {} processes", num_ranks,
          std::min(world, kMaxRanks), world);
  meet(MPI_COMM_WORLD, deadline);
  MPI_Comm members = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(MPI_COMM_WORLD, rank < num_ranks ? 0 : MPI_UNDEFINED, rank, &members),
            "MPI_Comm_split");
  if (members == MPI_COMM_NULL) return nullptr;
  MPI_Comm_set_errhandler(members, MPI_ERRORS_RETURN);
  if (transport != MpiTransport::kMessages) {
    if (all_on_one_host(members)) {
      const auto tell_all = [&](std::array<std::uint64_t, 2> words, Deadline limit) {
        MPI_Request request = MPI_REQUEST_NULL;
        check_mpi(MPI_Ibcast(words.data(), 2, MPI_UINT64_T, 0, members, &request), "MPI_Ibcast");
        complete(request, limit, "MPI_Ibcast");
        return words;
      };
      return make_process_rank(rank, num_ranks, "mpi", tell_all);
    }
    if (transport == MpiTransport::kShared) {
      fail(ErrorCode::kUnsupported, "the {} ranks are on several hosts: no shared memory",
           num_ranks);
    }
  }
  return make_message_rank(members);
}

}  // namespace switchyard
