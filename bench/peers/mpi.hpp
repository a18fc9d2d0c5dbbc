#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard::bench {

/// MPI's own all-to-all with messages of given sizes, to measure beside ours.
class MpiPeer {
 public:
  /// Why MPI cannot be measured beside these ranks; "" if it can. `world` may be null.
  [[nodiscard]] static std::string missing(const Communicator* world);

  /// @param send     Bytes from this rank to each.
  /// @param receive  Bytes to this rank from each.
  MpiPeer(std::vector<std::int64_t> send, std::vector<std::int64_t> receive);
  ~MpiPeer();
  MpiPeer(const MpiPeer&) = delete;
  MpiPeer& operator=(const MpiPeer&) = delete;

  /// Collective: one MPI_Alltoallv of bytes that lie ready.
  void forward();
  /// The same back: what was received is sent.
  void backward();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard::bench
