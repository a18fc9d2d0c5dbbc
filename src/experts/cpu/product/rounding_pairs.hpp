#pragma once

// Words of bf16 pairs by AVX-512's bf16 instructions, beside what every AVX-512 has.

#include "experts/cpu/product/pair_rows.hpp"

namespace switchyard::cpu {

/// Adds to `Pairs` (Avx512Pairs) how stored weights become bf16 by the instruction that rounds. For
/// files that are compiled with it.
template <class Pairs>
struct RoundingPairs : Pairs {
  using Bits = typename Pairs::Bits;
  using Reg = typename Pairs::Reg;

  static constexpr bool kRoundsToBF16 = true;

  static Reg sixteen_bf16(const std::uint16_t (&words)[16]) {
    return Pairs::from_bf16(reinterpret_cast<const std::byte*>(words));
  }
  /// By the low four bits of each lane.
  static Reg number_of(Reg sixteen, Bits code) { return _mm512_permutexvar_ps(code, sixteen); }
  template <int kBits>
  static Bits shifted(Bits lanes) {
    return kBits == 0 ? lanes : _mm512_srli_epi32(lanes, kBits);
  }
  /// Words: those of `first`, then those of `second`. Numbers below normal ones become 0.
  static Bits rounded(Reg first, Reg second) {
    return reinterpret_cast<Bits>(_mm512_cvtne2ps_pbh(second, first));
  }
  static Reg as_floats(Bits pairs) { return _mm512_castsi512_ps(pairs); }
  /// No number but 0 below the normal ones.
  static bool are_normal(Reg a) {
    constexpr int kSubnormal = 0x20;
    return _mm512_fpclass_ps_mask(a, kSubnormal) == 0;
  }

  /// Of what each column has, what lane l wants for the column l / 4 * 4 + l % 2 * 2, or the next.
  static Reg of_even_columns(Reg a) { return _mm512_permutexvar_ps(even_columns(), a); }
  static Reg of_odd_columns(Reg a) {
    return _mm512_permutexvar_ps(_mm512_add_epi32(even_columns(), _mm512_set1_epi32(1)), a);
  }
  /// Of words in that order the first two depths of all columns side by side, and the next two.
  static Bits first_pairs(Bits even, Bits odd) {
    return _mm512_permutex2var_epi16(even, places_of_pairs(), odd);
  }
  static Bits second_pairs(Bits even, Bits odd) {
    return _mm512_permutex2var_epi16(
        even, _mm512_add_epi16(places_of_pairs(), _mm512_set1_epi16(2)), odd);
  }

 private:
  static Bits even_columns() {
    return _mm512_setr_epi32(0, 2, 0, 2, 4, 6, 4, 6, 8, 10, 8, 10, 12, 14, 12, 14);
  }
  /// Word 2c + d of a result: word 16d + c / 4 * 4 + c % 4 / 2 of the even or odd columns'.
  static Bits places_of_pairs() {
    alignas(64) static constexpr std::uint16_t kPlaces[32] = {
        0, 16, 32, 48, 1, 17, 33, 49, 4,  20, 36, 52, 5,  21, 37, 53,
        8, 24, 40, 56, 9, 25, 41, 57, 12, 28, 44, 60, 13, 29, 45, 61};
    return _mm512_load_si512(kPlaces);
  }
};

}  // namespace switchyard::cpu
