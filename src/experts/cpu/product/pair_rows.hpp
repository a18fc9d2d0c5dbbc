#pragma once

// bf16 rows as the bf16 instructions take them: pairs of neighbours along the reduction.

#include "experts/cpu/kernels/avx512.hpp"

namespace switchyard::cpu {

/// Blocks of pairs: [depth/2][rows][2] bf16.
template <class V>
struct PairRows {
  static std::int64_t block(const RowBlocks& blocks, std::int64_t b, std::int64_t depth) {
    return blocks.begin(b) * depth;
  }
  /// `value` is a bf16 already.
  static void put(void* out, std::int64_t block, std::int64_t k, std::int64_t r, std::int64_t rows,
                  std::int64_t, float value) {
    static_cast<std::uint16_t*>(out)[block + 2 * ((k / 2) * rows + r) + k % 2] = V::narrow(value);
  }
};

/// Adds to Avx512 how a float that is a bf16 becomes one.
template <class Tag>
struct Avx512Pairs : Avx512<Tag> {
  static std::uint16_t narrow(float value) {
    return static_cast<std::uint16_t>(
        static_cast<unsigned>(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(value)))) >> 16);
  }
};

}  // namespace switchyard::cpu
