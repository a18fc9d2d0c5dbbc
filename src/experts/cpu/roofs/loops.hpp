#pragma once

// Loops that do nothing but what limits the kernels: multiply-adds in registers, reads in order.

#include "experts/cpu/kernels/kernels.hpp"

namespace switchyard::cpu {

/// Independent chains: more than latency times pipes of any CPU of these instruction sets.
inline constexpr int kSpinChains = 12;

/// `rounds` times kSpinChains multiply-adds on full registers; the result is of no use.
template <class V, class W>
float spin(std::int64_t rounds) {
  using Reg = typename V::Reg;
  Reg sums[kSpinChains];
#pragma GCC unroll 16
  for (int i = 0; i < kSpinChains; ++i) sums[i] = V::set(static_cast<float>(i));
  Reg b = V::set(0x1p-20F);  // sums stay finite
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSpinChains; ++i) sums[i] = W::multiply_add(sums[i], b, sums[i]);
    V::keep(b);  // or a compiler would see that every round is the same
  }
  float out[V::kWidth];
  float total = 0;
#pragma GCC unroll 16
  for (int i = 0; i < kSpinChains; ++i) {
    V::store(out, sums[i]);
    total += out[0];
  }
  return total;
}

/// Operations of one round.
template <class V, class W>
constexpr double spin_flops() {
  return 2.0 * kSpinChains * V::kWidth * W::kUnitDepth;
}

/// Reads `bytes` from `from` as kStreams neighbouring parts, side by side.
template <class V, int kStreams>
float read_streams(const std::byte* from, std::int64_t bytes) {
  using Reg = typename V::Reg;
  constexpr int kChunk = 512;  // of one stream before the next one has its turn
  constexpr int kRegisters = 4;
  const std::int64_t part = bytes / kStreams / kChunk * kChunk;
  Reg sums[kRegisters];
#pragma GCC unroll 4
  for (int i = 0; i < kRegisters; ++i) sums[i] = V::zero();
  for (std::int64_t i = 0; i < part; i += kChunk) {
#pragma GCC unroll 8
    for (int stream = 0; stream < kStreams; ++stream) {
      const auto* p = reinterpret_cast<const float*>(from + stream * part + i);
#pragma GCC unroll 32
      for (int j = 0; j < kChunk / 4 / V::kWidth; ++j) {
        sums[j % kRegisters] = V::add(sums[j % kRegisters], V::load(p + j * V::kWidth));
      }
    }
  }
  float out[V::kWidth];
  float total = 0;
#pragma GCC unroll 4
  for (int i = 0; i < kRegisters; ++i) {
    V::store(out, sums[i]);
    total += out[0];
  }
  return total;
}

template <class V>
float read_bytes(const std::byte* from, std::int64_t bytes, int streams) {
  switch (streams) {
    case 1: return read_streams<V, 1>(from, bytes);
    case 2: return read_streams<V, 2>(from, bytes);
    case 4: return read_streams<V, 4>(from, bytes);
    default: return read_streams<V, 8>(from, bytes);
  }
}

}  // namespace switchyard::cpu
