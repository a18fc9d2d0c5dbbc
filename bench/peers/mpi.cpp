// MPI_Alltoallv with buffers made once: what a program that uses MPI's collectives could reach.
#include "bench/peers/mpi.hpp"

#include <fmt/core.h>

#include <limits>
#include <string_view>

#include "core/check.hpp"
#if SWITCHYARD_WITH_MPI
#include <mpi.h>
#endif

namespace switchyard::bench {

#if SWITCHYARD_WITH_MPI

struct MpiPeer::State {
  struct Side {
    std::vector<int> counts, begins;
    std::vector<char> bytes;

    explicit Side(const std::vector<std::int64_t>& sizes) {
      std::int64_t begin = 0;
      for (const std::int64_t size : sizes) {
        require(begin + size <= std::numeric_limits<int>::max(),
                "messages of {} bytes in all exceed what MPI_Alltoallv can count", begin + size);
        counts.push_back(static_cast<int>(size));
        begins.push_back(static_cast<int>(begin));
        begin += size;
      }
      bytes.assign(static_cast<std::size_t>(begin), 1);
    }
  };
  Side send, receive;

  static void exchange(Side& from, Side& to) {
    const int status = MPI_Alltoallv(from.bytes.data(), from.counts.data(), from.begins.data(),
                                     MPI_BYTE, to.bytes.data(), to.counts.data(), to.begins.data(),
                                     MPI_BYTE, MPI_COMM_WORLD);
    if (status != MPI_SUCCESS) fail(ErrorCode::kCommunication, "MPI_Alltoallv failed: {}", status);
  }
};

std::string MpiPeer::missing(const Communicator* world) {
  int started = 0;
  MPI_Initialized(&started);
  if (world == nullptr || started == 0) return "needs ranks as MPI processes: mpirun -np R";
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size == world->size() ? "" : "needs all processes that mpirun has started";
}

MpiPeer::MpiPeer(std::vector<std::int64_t> send, std::vector<std::int64_t> receive)
    : state_(std::make_unique<State>(State{State::Side(send), State::Side(receive)})) {}
void MpiPeer::forward() { State::exchange(state_->send, state_->receive); }
void MpiPeer::backward() { State::exchange(state_->receive, state_->send); }

#else

struct MpiPeer::State {};
std::string MpiPeer::missing(const Communicator* /*world*/) { return "built without MPI"; }
MpiPeer::MpiPeer(std::vector<std::int64_t> /*send*/, std::vector<std::int64_t> /*receive*/) {
  fail(ErrorCode::kUnsupported, "built without MPI");
}
void MpiPeer::forward() {}
void MpiPeer::backward() {}

#endif

MpiPeer::~MpiPeer() = default;

}  // namespace switchyard::bench
