#pragma once

// The random numbers of routers, by their definitions.

#include <array>
#include <cstdint>

#include "switchyard/route.hpp"

namespace switchyard::reference {

using Words = std::array<std::uint32_t, 4>;

/// Philox4x32-10 (Salmon et al. 2011).
inline Words philox(Words c, std::uint32_t low, std::uint32_t high) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ULL * c[0];
    const std::uint64_t b = 0xCD9E8D57ULL * c[2];
    const auto word = [](std::uint64_t x, int shift) {
      return static_cast<std::uint32_t>(x >> shift);
    };
    c = {word(b, 32) ^ c[1] ^ low, word(b, 0), word(a, 32) ^ c[3] ^ high, word(a, 0)};
    low += 0x9E3779B9U;
    high += 0xBB67AE85U;
  }
  return c;
}

/// What a random number is for.
enum Purpose : std::uint32_t { kJitter, kLogitNoise, kSecond, kKeepSecond, kUniform };

/// Number `index` of token t: of (seed, step, layer, purpose), then of (token, index).
inline std::uint32_t word_of(const RouteRequest& request, Purpose purpose, std::int64_t t,
                             std::int64_t index) {
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const Words key = philox(
      {low(request.step), high(request.step), static_cast<std::uint32_t>(request.layer), purpose},
      low(request.seed), high(request.seed));
  const auto token = static_cast<std::uint64_t>(request.first_token + t);
  const auto block = static_cast<std::uint32_t>(index / 4);
  return philox({block, low(token), high(token), 0}, key[0],
                key[1])[static_cast<std::size_t>(index % 4)];
}

/// Uniform in [0, 1).
inline double unit_of(std::uint32_t word) { return (word >> 8) * 0x1p-24; }

/// Of a function of fp32 such as log and cos, for numbers around 1.
inline constexpr double kFunction = 1e-6;

}  // namespace switchyard::reference
