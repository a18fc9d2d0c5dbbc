#pragma once

#include <cstdint>

namespace switchyard {

/// <a, b> in 16 chains, whose number no machine changes.
inline float fixed_dot(const float* a, const float* b, std::int64_t n) {
  constexpr std::int64_t kChains = 16;
  float sums[kChains] = {};
  const std::int64_t whole = n - n % kChains;
  for (std::int64_t i = 0; i < whole; i += kChains) {
    for (std::int64_t c = 0; c < kChains; ++c) sums[c] += a[i + c] * b[i + c];
  }
  for (std::int64_t i = whole; i < n; ++i) sums[i - whole] += a[i] * b[i];
  for (std::int64_t half = kChains / 2; half > 0; half /= 2) {
    for (std::int64_t c = 0; c < half; ++c) sums[c] += sums[c + half];
  }
  return sums[0];
}

}  // namespace switchyard
