#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <numbers>

#include "core/splitmix64.hpp"

namespace switchyard {

/// Random numbers by counting (SplitMix64): the same for a seed on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  /// One of many streams of a seed.
  Random(std::uint64_t seed, std::uint64_t stream)
      : state_(splitmix64_mix(splitmix64_mix(seed) ^ stream)) {}

  std::uint64_t bits() { return splitmix64_mix(state_ += kSplitMix64Step); }

  /// A whole number in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  /// In (0, 1).
  double uniform() { return (static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53; }
  /// In [-1, 1), a multiple of 2^-23.
  float signed_unit() {
    return static_cast<float>(static_cast<std::int64_t>(bits() >> 40) - (std::int64_t{1} << 23)) *
           0x1p-23F;
  }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }
  bool one_in(std::int64_t n) { return between(1, n) == 1; }

  template <typename T>
  T any_of(std::initializer_list<T> list) {
    return list.begin()[between(0, static_cast<std::int64_t>(list.size()) - 1)];
  }

 private:
  std::uint64_t state_;
};

}  // namespace switchyard
