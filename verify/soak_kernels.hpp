#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "switchyard/device_dispatch.hpp"

namespace switchyard::verify {

/// On the device, over all exchanges of a rank.
struct SoakStatus {
  unsigned long long wrong;     ///< Elements that are not what they should be.
  unsigned long long first;     ///< (exchange << 32 | element) of the lowest of them.
  unsigned long long checksum;  ///< Of the bits of all outputs.
};

/// One exchange of one rank: memory on the device, all of it written by the kernels.
struct SoakExchange {
  std::uint64_t seed = 0;  ///< Of this exchange and rank.
  std::uint64_t index = 0;
  std::int64_t num_tokens = 0;
  std::int64_t hidden = 0;
  std::int32_t num_experts = 0;
  std::int32_t top_k = 0;
  DType dtype = DType::kF32;
  DType partial_type = DType::kF32;
  void* x = nullptr;               ///< [T, H].
  std::int32_t* expert = nullptr;  ///< [T, K].
  float* weight = nullptr;         ///< [T, K].
  void* partials = nullptr;        ///< [N max, H].
  float* out = nullptr;            ///< [T, H].
  SoakStatus* status = nullptr;
};

void launch_soak_tokens(const SoakExchange& exchange, cudaStream_t stream);
/// The experts' sums of the rows received.
void launch_soak_partials(const SoakExchange& exchange, const DeviceReceived& received,
                          cudaStream_t stream);
void launch_soak_check(const SoakExchange& exchange, cudaStream_t stream);

}  // namespace switchyard::verify
