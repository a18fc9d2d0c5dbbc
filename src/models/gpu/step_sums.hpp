#pragma once

// What ranks on GPUs add up once a step: the gradients that all of them have alike, and beside them
// what the norm and the selection biases want of all ranks.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "comm/device/device_exchange.hpp"

namespace switchyard::models::gpu {

class StepSums {
 public:
  /// Collective, on the current device, before any rank's kernels wait for another's. @param size
  /// Floats that the memory has, of which the first `summed` are added up.
  /// @throws As DeviceExchange.
  StepSums(Communicator& ranks, std::int64_t size, std::int64_t summed);

  /// [size], zeros at first; aligned to 256 bytes.
  [[nodiscard]] float* memory() const { return memory_; }
  /// The first `summed` values become the sums over all ranks, by the tree of ranks: the same bits
  /// on each. Waits for nothing on the host, but where ranks share a GPU.
  void add_up(cudaStream_t stream);
  /// Another rank is on this one's GPU.
  [[nodiscard]] bool shares_gpu() const { return exchange_.ranks_on_device() > 1; }
  /// @throws Error{kTimeout}, {kCommunication}: what a kernel has waited for in vain.
  void check() const { exchange_.check(); }

 private:
  DeviceExchange exchange_;
  std::int64_t summed_;
  float* memory_;
};

}  // namespace switchyard::models::gpu
