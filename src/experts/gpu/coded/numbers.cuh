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

/// Bytes 0 to 3 of `lower` and 4 to 7 of `upper`, by the lower four digits of `digits`.
__device__ __forceinline__ std::uint32_t chosen(std::uint32_t lower, std::uint32_t upper,
                                                std::uint32_t digits) {
  std::uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(lower), "r"(upper), "r"(digits));
  return out;
}
/// `bytes` with the highest bit of each byte of `signs`; in one instruction, which the compiler
/// makes two of where it likes to begin before `bytes` is there.
__device__ __forceinline__ std::uint32_t with_signs(std::uint32_t bytes, std::uint32_t signs) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xf8;" : "=r"(out) : "r"(bytes), "r"(signs), "n"(kByteSigns));
  return out;
}

/// What codes of MXFP4 are with a scale, the byte beside them: numbers of e5m2 (layout.hpp).
struct Mxfp4Table {
  std::uint32_t lower;
  std::uint32_t upper;

  explicit __device__ __forceinline__ Mxfp4Table(std::uint32_t scale)
      : lower(mxfp4_lower(scale)), upper(mxfp4_upper(scale)) {}
  /// 8 numbers of a word: of even columns, of odd ones.
  [[nodiscard]] __device__ __forceinline__ uint2 numbers(std::uint32_t word) const {
    const std::uint32_t codes = word & kMxfp4Magnitudes;
    const std::uint32_t shifted = word << 4;  // brings signs of even places to the ends of bytes
    return {with_signs(chosen(lower, upper, codes), chosen(word, shifted, 0x1504)),
            with_signs(chosen(lower, upper, codes >> 16), chosen(word, shifted, 0x3726))};
  }
};

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
