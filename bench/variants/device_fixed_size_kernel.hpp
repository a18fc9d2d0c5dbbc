#pragma once

// What host and kernel of the fixed-size exchange between GPUs share.

#include <cstdint>

#include "comm/device/exchange.hpp"

namespace switchyard {

struct FixedSizeParams {
  DeviceExchangeParams exchange;  ///< Of it window, layout, state, failure, timeout and rank.
  const void* x;                  ///< [T, H].
  const std::int32_t* token;      ///< Sorted by (destination, token).
  std::int64_t begin[kMaxDeviceRanks + 1];  ///< Into token.
  std::int64_t rows_per_pair;               ///< M.
};

void load_fixed_size_kernel();
void launch_fixed_size(const FixedSizeParams& params, int ctas, void* stream);

}  // namespace switchyard
