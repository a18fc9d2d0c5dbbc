#pragma once

#include <cstdint>

#include "comm/device/limits.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

/// What a call on a GPU leaves in pinned memory for the host to look at.
struct CallStatus {
  static constexpr int kMaxRankPairs = kMaxDeviceRanks * kMaxDeviceRanks;

  DeviceStatus status;
  std::int32_t rows_used = 0;
  std::int32_t rows_executed = 0;
  std::int64_t rows_between_ranks[kMaxRankPairs] = {};
};

/// Where the device has them.
struct CallStatusOnDevice {
  const DeviceStatus* status = nullptr;
  const std::int32_t* rows_used = nullptr;
  const std::int32_t* rows_executed = nullptr;
  const std::int64_t* rows_between_ranks = nullptr;  ///< [num_rank_pairs]
  std::int32_t num_rank_pairs = 0;
};

}  // namespace switchyard
