#pragma once

#include "switchyard/comm.hpp"

namespace switchyard {

/// How the ranks lie on devices.
struct DeviceSharing {
  int here = 1;              ///< Ranks on this rank's device.
  int most = 1;              ///< Ranks on the device that has most of them.
  bool bulk_copies = false;  ///< All devices are Hopper's: their blocks can copy pieces in bulk.
};

/// Collective. The device of this rank is `device`; two ranks share one if its UUID is the same.
[[nodiscard]] DeviceSharing device_sharing(Communicator& communicator, int device);

/// Kernels of ranks that share a device wait for each other: a kernel that is loaded only when it
/// is first launched may have to wait for those that spin, which wait for it.
/// @throws Error{kUnsupported} where the driver loads kernels so (CUDA_MODULE_LOADING says).
void require_loaded_kernels();

}  // namespace switchyard
