#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Bytes on the device that go to a rank or come from it.
struct RankBytes {
  int rank = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// NCCL's own way between pairs of ranks, the usual all-to-all: ncclSend and ncclRecv in a group.
class NcclPairs {
 public:
  /// Collective, on the current device. @throws Error{kUnsupported} on every rank: no NCCL here, or
  /// two ranks on one GPU, in NCCL's words {kCommunication}; {kTimeout}.
  explicit NcclPairs(Communicator& communicator);
  /// Collective.
  ~NcclPairs();
  NcclPairs(const NcclPairs&) = delete;
  NcclPairs& operator=(const NcclPairs&) = delete;

  /// Enqueues one group on `stream`: collective, and the bytes of both sides agree. The first time
  /// a pair is used it is connected, which cannot be captured in a graph.
  void exchange(std::span<const RankBytes> sends, std::span<const RankBytes> receives,
                void* stream);
  /// @throws Error{kCommunication}: NCCL has met an error since.
  void check() const;
  /// The other ranks do not come to the end.
  void keep();
  /// Makes kernels that wait for others leave, at once; nothing may be called after it.
  void abort() noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
