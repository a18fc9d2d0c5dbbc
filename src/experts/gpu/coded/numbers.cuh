#pragma once

// From codes in registers to bf16 numbers there: of 8 codes of a row four words, which are a lane's
// operands of mma and wgmma.

#include <cuda_bf16.h>

#include <cstdint>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/coded/layout.hpp"

namespace switchyard::coded {

/// Both numbers of a word times both of another, exact.
__device__ __forceinline__ std::uint32_t multiply_pair(std::uint32_t a, std::uint32_t b) {
  union {
    std::uint32_t bits;
    __nv_bfloat162 pair;
  } x, y;
  x.bits = a;
  y.bits = b;
  x.pair = __hmul2(x.pair, y.pair);
  return x.bits;
}

/// A lane's 8 numbers of a row and a step, as they would lie in memory: four words.
__device__ __forceinline__ uint4 mxfp4_numbers(std::uint32_t word, std::uint32_t raise) {
  return {multiply_pair(mxfp4_pair<0>(word), raise), multiply_pair(mxfp4_pair<1>(word), raise),
          multiply_pair(mxfp4_pair<2>(word), raise), multiply_pair(mxfp4_pair<3>(word), raise)};
}
/// The first (or last) two codes of a word as numbers. Each byte goes to the lower half of 16 bits
/// with its sign all over the upper one: one shift then puts both where they belong.
template <bool kLast>
__device__ __forceinline__ std::uint32_t e4m3_numbers(std::uint32_t word) {
  const std::uint32_t wide = ptx::permute_bytes < kLast ? 0xb3a2 : 0x9180 > (word);
  return multiply_pair((wide << kE4M3At) & (kE4M3Mask | kSigns), kE4M3Raise);
}
__device__ __forceinline__ uint4 e4m3_numbers(uint2 words) {
  return {e4m3_numbers<false>(words.x), e4m3_numbers<true>(words.x), e4m3_numbers<false>(words.y),
          e4m3_numbers<true>(words.y)};
}

}  // namespace switchyard::coded
