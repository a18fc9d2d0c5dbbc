#pragma once

#include <cstdint>

#include "core/gpu/host_device.hpp"

namespace switchyard {

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"):
// four words that are a function of a counter and a key, so that any number can be made by itself,
// with the same bits on a CPU and a GPU.

struct PhiloxKey {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
};

struct PhiloxWords {
  std::uint32_t word[4] = {};
};

SWITCHYARD_HOST_DEVICE constexpr std::uint32_t low_word(std::uint64_t x) {
  return static_cast<std::uint32_t>(x);
}
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t high_word(std::uint64_t x) {
  return static_cast<std::uint32_t>(x >> 32);
}

/// The keys of the ten rounds, for who draws many numbers with one key.
struct PhiloxRounds {
  PhiloxKey key[10] = {};

  PhiloxRounds() = default;
  SWITCHYARD_HOST_DEVICE constexpr explicit PhiloxRounds(PhiloxKey first) {
    for (PhiloxKey& of_round : key) {
      of_round = first;
      first.low += 0x9E3779B9U;
      first.high += 0xBB67AE85U;
    }
  }
};

SWITCHYARD_HOST_DEVICE constexpr PhiloxWords philox4x32(PhiloxWords counter,
                                                        const PhiloxRounds& rounds) {
  for (const PhiloxKey& key : rounds.key) {
    const std::uint64_t a = std::uint64_t{0xD2511F53U} * counter.word[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * counter.word[2];
    counter = {{high_word(b) ^ counter.word[1] ^ key.low, low_word(b),
                high_word(a) ^ counter.word[3] ^ key.high, low_word(a)}};
  }
  return counter;
}

SWITCHYARD_HOST_DEVICE constexpr PhiloxWords philox4x32(PhiloxWords counter, PhiloxKey key) {
  return philox4x32(counter, PhiloxRounds(key));
}

/// In [0, 1), of 24 bits: exact in float.
SWITCHYARD_HOST_DEVICE constexpr float unit_of(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1p-24F;
}

}  // namespace switchyard
