#pragma once

#include <cstddef>
#include <memory>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Device memory of equal size on every rank of one NVLink domain, registered with NCCL as a
/// symmetric window, and the peers' addresses of it. NCCL is not called again until the end.
class NcclWindows {
 public:
  /// Collective; zeroed. Uses the calling thread's current device.
  /// @throws Error{kUnsupported} on every rank: no NCCL or no device API here, or the domain ends
  /// between the ranks; {kTimeout}; {kCommunication}; {kOutOfMemory}.
  NcclWindows(Communicator& communicator, std::size_t bytes);
  /// Collective, unless kept.
  ~NcclWindows();
  NcclWindows(const NcclWindows&) = delete;
  NcclWindows& operator=(const NcclWindows&) = delete;

  /// The other ranks do not come to the end.
  void keep();
  [[nodiscard]] std::byte* part(int rank) const;
  /// @throws Error{kCommunication}: NCCL has met an error since.
  void check() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
