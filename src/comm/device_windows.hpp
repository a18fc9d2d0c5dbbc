#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/nccl_windows.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

/// Device memory of equal size on every rank, and the others' as this rank's device reaches it.
class DeviceWindows {
 public:
  /// Collective; zeroed. Uses the calling thread's current device.
  /// @throws Error{kUnsupported}: a rank's memory cannot be reached from here, on every rank;
  /// {kOutOfMemory}; {kDevice}; {kCommunication}: NCCL fails.
  DeviceWindows(Communicator& communicator, std::size_t bytes, DeviceEngine engine);
  ~DeviceWindows();
  DeviceWindows(const DeviceWindows&) = delete;
  DeviceWindows& operator=(const DeviceWindows&) = delete;

  /// The own part is never freed: for when others may still write to it.
  void keep();
  [[nodiscard]] std::byte* part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  /// kPeer or kNccl.
  [[nodiscard]] DeviceEngine engine() const {
    return nccl_ ? DeviceEngine::kNccl : DeviceEngine::kPeer;
  }
  /// @throws Error{kCommunication}: NCCL has met an error since.
  void check() const {
    if (nccl_) nccl_->check();
  }

 private:
  void reach_peers(Communicator& communicator, std::size_t bytes);
  void ask_nccl(Communicator& communicator, std::size_t bytes);
  void release() noexcept;

  int own_rank_;
  bool kept_ = false;
  std::vector<std::byte*> parts_;
  std::vector<bool> opened_;  // by IPC
  std::unique_ptr<NcclWindows> nccl_;
};

}  // namespace switchyard
