#pragma once

// Counts on their way through sums of floats: two floats each, whose sums are exact.

#include <cstdint>

#include "core/gpu/host_device.hpp"

namespace switchyard {

inline constexpr int kLowCountBits = 16;

/// The last 16 bits, and the rest. Over up to 128 ranks sums of `low` are below 2^24, where every
/// whole number is a float; so are those of `rest` where the sum of the counts is below 2^40.
struct SplitCount {
  float low, rest;
};
[[nodiscard]] SWITCHYARD_HOST_DEVICE constexpr SplitCount split_count(std::int64_t count) {
  return {static_cast<float>(count & ((std::int64_t{1} << kLowCountBits) - 1)),
          static_cast<float>(count >> kLowCountBits)};
}
/// The sum of counts, of the sums of their parts.
[[nodiscard]] SWITCHYARD_HOST_DEVICE constexpr std::int64_t joined_count(float low, float rest) {
  return static_cast<std::int64_t>(low) + (static_cast<std::int64_t>(rest) << kLowCountBits);
}
static_assert(joined_count(2 * split_count(0x12345ffff).low, 2 * split_count(0x12345ffff).rest) ==
              2 * 0x12345ffff);

}  // namespace switchyard
