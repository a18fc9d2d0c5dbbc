#pragma once

#include <cstddef>
#include <vector>

#include "bench/exchange/fixed_size_run.hpp"

namespace switchyard::bench {

/// What one rank on a GPU brings home.
struct DeviceFixedSizeRun {
  std::int64_t wire_bytes = 0;
  std::vector<std::byte> received{};  ///< [R * M, H] of the last exchange.
};

/// Collective, on the GPU of the rank; `tokens` [T, H] are on the host. Adds "exchange", one of a
/// chain in a graph, "eager", one launched by the host, and with the peer "nccl_all_to_all".
[[nodiscard]] DeviceFixedSizeRun measure_device_fixed_size(Communicator& communicator,
                                                           const FixedSizeCase& c,
                                                           const FixedSizeRouting& routing,
                                                           ConstRawMatrix tokens,
                                                           StageTimes& times);

}  // namespace switchyard::bench
