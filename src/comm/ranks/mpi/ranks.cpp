// Engine "mpi": starts MPI, finds out on which hosts the ranks are, and chooses how bytes move.
#include "switchyard/mpi.hpp"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/exchange_layout.hpp"
#include "comm/ranks/deadline.hpp"
#include "comm/ranks/engine_words.hpp"
#include "comm/ranks/mpi/messages.hpp"
#include "comm/ranks/process_ranks.hpp"
#include "comm/ranks/topology.hpp"
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

/// Ranks are on one node where MPI lets them share memory.
Topology topology_of(MPI_Comm communicator, Deadline deadline) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(communicator, &rank);
  MPI_Comm_size(communicator, &size);
  MPI_Comm node = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node),
            "MPI_Comm_split_type");
  MPI_Comm_set_errhandler(node, MPI_ERRORS_RETURN);
  MPI_Request request = MPI_REQUEST_NULL;
  int first = rank;
  check_mpi(MPI_Iallreduce(&rank, &first, 1, MPI_INT, MPI_MIN, node, &request), "MPI_Iallreduce");
  complete(request, deadline, "MPI_Iallreduce");
  MPI_Comm_free(&node);

  std::vector<int> firsts(static_cast<std::size_t>(size));
  check_mpi(MPI_Iallgather(&first, 1, MPI_INT, firsts.data(), 1, MPI_INT, communicator, &request),
            "MPI_Iallgather");
  complete(request, deadline, "MPI_Iallgather");
  constexpr std::size_t kName = MPI_MAX_PROCESSOR_NAME + 1;
  std::array<char, kName> name{};
  int length = 0;
  MPI_Get_processor_name(name.data(), &length);
  std::vector<char> all(static_cast<std::size_t>(size) * kName);
  check_mpi(MPI_Iallgather(name.data(), kName, MPI_CHAR, all.data(), kName, MPI_CHAR, communicator,
                           &request),
            "MPI_Iallgather");
  complete(request, deadline, "MPI_Iallgather");
  std::vector<std::string> names;
  for (std::size_t r = 0; r < firsts.size(); ++r) names.emplace_back(&all[r * kName]);
  return topology_of_hosts(firsts, names);
}

/// A rank that is on another node than rank 0.
int first_elsewhere(const Topology& topology) {
  int rank = 0;
  while (topology.node[static_cast<std::size_t>(rank)] == 0) ++rank;
  return rank;
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
  Topology topology = topology_of(members, deadline);
  if (transport != MpiTransport::kMessages) {
    if (topology.num_nodes() == 1) {
      const auto tell_all = [&](std::array<std::uint64_t, 2> words, Deadline limit) {
        MPI_Request request = MPI_REQUEST_NULL;
        check_mpi(MPI_Ibcast(words.data(), 2, MPI_UINT64_T, 0, members, &request), "MPI_Ibcast");
        complete(request, limit, "MPI_Ibcast");
        return words;
      };
      return make_process_rank(rank, num_ranks, kMpiEngine, tell_all);
    }
    if (transport == MpiTransport::kShared) {
      fail(ErrorCode::kUnsupported, "{}, but {}: they share no memory, want messages",
           topology.place_of(0), topology.place_of(first_elsewhere(topology)));
    }
  }
  return make_message_rank(members, std::move(topology));
}

}  // namespace switchyard
