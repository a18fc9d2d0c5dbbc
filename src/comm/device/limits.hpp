#pragma once

// What the kernels of the exchange between GPUs are made for; others have their own limits, or
// none.

#include <cstdint>

namespace switchyard {

/// Ranks of one exchange, and rows that come home for a token: sets of them are bits of a RankMask.
inline constexpr int kMaxDeviceRanks = 8;
inline constexpr int kMaxDeviceExperts = 4096;
inline constexpr int kMaxDeviceTopK = 32;
/// Of a rank in a call: a block knows the places of all of them, in 16 bits and shared memory.
inline constexpr std::int64_t kMaxDeviceTokens = 32768;

/// A set of ranks where many are kept in shared memory, a bit a rank.
using RankMask = std::uint8_t;
inline constexpr int kRankMaskBits = 8 * static_cast<int>(sizeof(RankMask));
static_assert(kMaxDeviceRanks <= kRankMaskBits);

}  // namespace switchyard
