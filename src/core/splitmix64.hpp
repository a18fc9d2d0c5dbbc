#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/gpu/host_device.hpp"

namespace switchyard {

// SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): number n
// of a stream is splitmix64_mix(seed + n * kSplitMix64Step), so that any part of it can be made by
// itself, with the same bits on every machine.

inline constexpr std::uint64_t kSplitMix64Step = 0x9e3779b97f4a7c15ULL;

/// The finalizer: every bit of the result depends on every bit of the argument.
SWITCHYARD_HOST_DEVICE constexpr std::uint64_t splitmix64_mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

/// `hash` moved on by bytes: tells texts and files apart, and hides nothing from who means to.
[[nodiscard]] inline std::uint64_t hash_bytes(std::uint64_t hash,
                                              std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    std::uint64_t word = 0;
    const std::size_t count = bytes.size() < sizeof word ? bytes.size() : sizeof word;
    for (std::size_t i = 0; i < count; ++i) {
      word |= std::to_integer<std::uint64_t>(bytes[i]) << 8 * i;
    }
    hash = (hash ^ word) * 0x9fb21c651e98df25ULL;  // odd, so nothing is lost
    hash ^= hash >> 29;
    bytes = bytes.subspan(count);
  }
  return hash;
}

}  // namespace switchyard
