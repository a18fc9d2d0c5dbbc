#pragma once

// Plain loops that the compiler turns into the widest vectors this machine has: their body is
// inlined into a function for each instruction set. Nobody contracts a*b+c here (the build forbids
// it), so the bits are those of the plain loop on every machine. A reduction is written with lanes
// of its own: the compiler may not reorder one.

#include <bit>
#include <cstdint>

#include "core/cpu/multi_isa.hpp"

namespace switchyard::cpu {

/// Of a lambda's body, between its parameters and its braces.
#define SWITCHYARD_INLINE __attribute__((always_inline))

#ifdef SWITCHYARD_X86
template <class Body>
SWITCHYARD_TARGET("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")
void run_on_avx512(const Body& body) {
  body();
}
template <class Body>
SWITCHYARD_TARGET("avx2,fma,f16c")
void run_on_avx2(const Body& body) {
  body();
}
#endif

/// Runs `body`, a lambda marked SWITCHYARD_INLINE whose calls are inlined too.
template <class Body>
void vectorized(const Body& body) {
#ifdef SWITCHYARD_X86
  if (has_avx512_bw_dq()) return run_on_avx512(body);
  if (has_avx2()) return run_on_avx2(body);
#endif
  body();
}

inline constexpr std::int64_t kLanes = 16;

/// e^x to 2 float ulp, x kept within [-87, 88]; a NaN passes. As experts/cpu/product/math.hpp, but
/// for any vector width and without fma.
SWITCHYARD_INLINE inline float exp_of(float x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: what is added to it is rounded
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  const float rounded = x * 1.44269504F + kRound;
  const float n = rounded - kRound;
  float r = x - n * 0.693359375F;
  r = r + n * 2.12194440e-4F;
  float p = 0.00019909646F;
  p = p * r + 0.0013946446F;
  p = p * r + 0.0083332807F;
  p = p * r + 0.041666262F;
  p = p * r + 0.16666667F;
  p = p * r + 0.5F;
  p = r * r * p + r + 1.0F;
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(rounded) + 127U;
  return p * std::bit_cast<float>(exponent << 23);
}

/// Sum of a[i] * b[i] in kLanes chains, which are then added by halves.
SWITCHYARD_INLINE inline float dot_of(const float* a, const float* b, std::int64_t n) {
  float sum[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) sum[j] += a[i + j] * b[i + j];
  }
  for (std::int64_t j = 0; i + j < n; ++j) sum[j] += a[i + j] * b[i + j];
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t j = 0; j < half; ++j) sum[j] += sum[j + half];
  }
  return sum[0];
}

}  // namespace switchyard::cpu
