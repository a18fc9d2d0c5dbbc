#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Device memory of equal size on every rank, and the others' as this rank's device reaches it: by
/// peer access within a process, by CUDA IPC between processes of one host.
class DeviceWindows {
 public:
  /// Collective; zeroed. Uses the calling thread's current device.
  /// @throws Error{kUnsupported}: a rank's memory cannot be reached from here, on every rank;
  /// {kOutOfMemory}; {kDevice}.
  DeviceWindows(Communicator& communicator, std::size_t bytes);
  ~DeviceWindows();
  DeviceWindows(const DeviceWindows&) = delete;
  DeviceWindows& operator=(const DeviceWindows&) = delete;

  /// The own part is never freed: for when others may still write to it.
  void keep() { kept_ = true; }
  [[nodiscard]] std::byte* part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }

 private:
  int own_rank_;
  bool kept_ = false;
  std::vector<std::byte*> parts_;
  std::vector<bool> opened_;  // by IPC
};

}  // namespace switchyard
