#pragma once

// Waits for all of a device, and captures, which such a wait of another thread would void.

#include <cuda_runtime_api.h>

#include <mutex>
#include <shared_mutex>

namespace switchyard {

/// cudaDeviceSynchronize(), once no other thread of this process captures a stream of the current
/// device: CUDA refuses the wait where one does (cudaErrorStreamCaptureUnsupported), and may void
/// what is captured. Several threads may wait at a time.
cudaError_t wait_for_device() noexcept;

/// Held while a stream of the current device is captured: other threads' waits come behind it. A
/// wait of the thread that holds it is refused by CUDA, as it has to be.
class CaptureTurn {
 public:
  CaptureTurn();
  ~CaptureTurn();
  CaptureTurn(const CaptureTurn&) = delete;
  CaptureTurn& operator=(const CaptureTurn&) = delete;

 private:
  std::unique_lock<std::shared_mutex> turn_;
};

}  // namespace switchyard
