#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/nccl/windows/windows.hpp"
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

  /// Collective, once, before the destructor: the own part is freed only if all other ranks come
  /// here too within `limit`, and so write to it no more. Each says so in the windows themselves:
  /// a rank that has left by an error, or is in another barrier, is not taken for one that ends.
  void end(std::chrono::milliseconds limit) noexcept;
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
  void say_goodbye(std::chrono::milliseconds limit);
  void keep();
  void release() noexcept;

  int own_rank_;
  std::int64_t own_bytes_ = 0;
  int device_ = 0;
  std::size_t goodbyes_;  // where in each part: a word of each rank, 1 once it has ended
  bool kept_ = false;
  std::vector<std::byte*> parts_;
  std::vector<bool> opened_;  // by IPC
  std::unique_ptr<NcclWindows> nccl_;
};

}  // namespace switchyard
