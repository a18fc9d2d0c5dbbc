#pragma once

// 512-bit vectors. Each file that includes this gives a type of its own as Tag, in an unnamed
// namespace: files are compiled for different instruction sets and must not share code.

#include <immintrin.h>

#include "core/cpu/features.hpp"
#include "experts/cpu/product/rows.hpp"

namespace switchyard::cpu {

template <class Tag>
struct Avx512 {
  using Reg = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kMaxRows = 14;  ///< 28 sums, two weights, one broadcast of 32 registers.
  static constexpr int panels(int rows) { return rows <= 2 ? 4 : rows == 3 ? 2 : 1; }

  static constexpr std::int64_t kPieceBytes = 16 << 10;
  /// With one block: from so many rows on, so far ahead. With fewer Zen 4 does better alone
  /// (prototype of 2026-11-20); Xeons (model 207) take a quarter longer for 3 to 7 rows alone.
  static int ahead_rows() { return cpu_vendor() == CpuVendor::kAmd ? 8 : 1; }
  static constexpr std::int64_t kAheadBytes = 8 << 10;

  static void prefetch(const std::byte* p) { _mm_prefetch(p, _MM_HINT_T1); }
  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg set(float x) { return _mm512_set1_ps(x); }
  static Reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Reg a) { _mm512_storeu_ps(p, a); }
  static void stream(float* p, Reg a) { _mm512_stream_ps(p, a); }
  /// 2 * kWidth of them, rounded.
  using Words = __m512i;
  static Words bf16_words(Reg a, Reg b) {
    const auto words = [](Reg x) {
      return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(round_bf16(x)), 16));
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(words(a)), words(b), 1);
  }
  static Words f16_words(Reg a, Reg b) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(a, kNearest)),
                              _mm512_cvtps_ph(b, kNearest), 1);
  }
  static void store_words(std::byte* p, Words a) { _mm512_storeu_si512(p, a); }
  static void stream_words(std::byte* p, Words a) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), a);
  }
  static void keep(Reg& a) { asm volatile("" : "+v"(a)); }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg exact_fma(Reg a, Reg b, Reg c) { return fma(a, b, c); }
  static Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static Reg abs(Reg a) { return _mm512_abs_ps(a); }
  static Reg round(Reg a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Reg pow2(Reg n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }
  static Reg select_negative(Reg x, Reg negative, Reg other) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), other, negative);
  }
  static Reg round_bf16(Reg a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i rounded = rounded_up(a);
    // The carry would turn a NaN into something else: quiet it instead.
    const __m512i nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_mask_blend_epi32(is_nan, rounded, nan), high_half()));
  }
  static Reg round_f16(Reg a) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static float widen_one(std::uint16_t bits, DType dtype) {
    if (dtype == DType::kF16) return _cvtsh_ss(bits);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits) << 16)));
  }
  static Reg first_bf16(const std::byte* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
  }
  static Reg second_bf16(const std::byte* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high_half()));
  }
  static Reg from_f16(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  using Int = __m512i;
  static Int int_zero() { return _mm512_setzero_si512(); }
  static Int widen_i8(const std::byte* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Int broadcast_pair(const std::byte* p) {
    return _mm512_castps_si512(_mm512_set1_ps(*reinterpret_cast<const float*>(p)));
  }
  static Int add_products(Int a, Int b, Int c) {
    return _mm512_add_epi32(c, _mm512_madd_epi16(a, b));
  }
  static Reg to_float(Int a) { return _mm512_cvtepi32_ps(a); }
  static void store_rounded(std::int32_t* p, Reg a) {
    _mm512_storeu_si512(p, _mm512_cvtps_epi32(a));
  }

  /// Stored weights on their way to floats: bytes, and pairs of bf16.
  static constexpr bool kRoundsToBF16 = false;  ///< By an instruction.
  using Bits = __m512i;
  static Bits load_bits(const std::byte* p) { return _mm512_loadu_si512(p); }
  static void store_bits(std::byte* p, Bits a) { _mm512_storeu_si512(p, a); }
  static Bits every_byte(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static Bits every_word(int x) { return _mm512_set1_epi16(static_cast<short>(x)); }
  static Bits table(const std::uint8_t* bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static Bits look_up(Bits table, Bits index) { return _mm512_shuffle_epi8(table, index); }
  static Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
  static Bits either(Bits a, Bits b) { return _mm512_or_si512(a, b); }
  static Bits smaller(Bits a, Bits b) { return _mm512_min_epu8(a, b); }
  static Bits high_nibbles(Bits a) { return both(_mm512_srli_epi16(a, 4), every_byte(15)); }
  static Bits low_words(Bits low, Bits high) { return _mm512_unpacklo_epi8(low, high); }
  static Bits high_words(Bits low, Bits high) { return _mm512_unpackhi_epi8(low, high); }
  static Bits shift_signed(Bits words) { return _mm512_srai_epi16(words, 4); }
  static Bits add_words(Bits a, Bits b) { return _mm512_add_epi16(a, b); }
  /// Not below 0.
  static Bits subtract_words(Bits a, Bits b) { return _mm512_subs_epu16(a, b); }
  static Reg first_of(Bits pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static Reg second_of(Bits pairs) { return _mm512_castsi512_ps(both(pairs, high_half())); }
  static void store_f16(std::byte* p, Reg a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  /// Rounded to bf16, the first of a pair in the low half of a lane; no NaN among them.
  static Bits pairs_of(Reg first, Reg second) {
    return either(_mm512_srli_epi32(rounded_up(first), 16), both(rounded_up(second), high_half()));
  }
  /// Scales of int4: kWidth of them, at any address.
  static Reg from_bf16(const std::byte* p) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  /// Four bits of each of kWidth bytes, from `bit` on, as numbers.
  static Reg from_nibbles(const std::byte* p, int bit) {
    const __m512i lanes =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const auto shift = static_cast<unsigned>(bit);
    return to_float(both(_mm512_srli_epi32(lanes, shift), _mm512_set1_epi32(15)));
  }
  /// kWidth of e4m3, times 2^-8: their bits where f16 has them.
  static Reg from_e4m3(const std::byte* p) {
    const __m256i words =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i placed = _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 1);
    return _mm512_cvtph_ps(_mm256_and_si256(placed, _mm256_set1_epi16(static_cast<short>(0xbf80))));
  }
  /// numbers * scale as bf16, less `taken`: the low bytes of all 16, and the high ones.
  static void table_of_products(const float (&numbers)[16], const std::uint32_t (&taken)[16],
                                float scale, Bits& low, Bits& high) {
    const __m512i rounded = _mm512_castps_si512(round_bf16(mul(load(numbers), set(scale))));
    const __m512i words =
        _mm512_sub_epi32(_mm512_srli_epi32(rounded, 16), _mm512_loadu_si512(taken));
    low = _mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(words));
    high = _mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(_mm512_srli_epi32(words, 8)));
  }
  /// (most - byte) << 7 in both words of each lane.
  static Bits exponents_below(int most, const std::byte* p) {
    const __m512i lanes =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i below = _mm512_sub_epi32(_mm512_set1_epi32(most), lanes);
    return either(_mm512_slli_epi32(below, 7), _mm512_slli_epi32(below, 23));
  }
  /// Whether 2 * kWidth bytes are within [least, most].
  static bool are_within(int least, int most, const std::byte* p) {
    const __m256i above = _mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                          _mm256_set1_epi8(static_cast<char>(least)));
    return _mm256_cmpgt_epu8_mask(above, _mm256_set1_epi8(static_cast<char>(most - least))) == 0;
  }

 private:
  /// So that the high half is the number as bf16, to nearest even.
  static __m512i rounded_up(Reg a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  }
  static __m512i high_half() { return _mm512_set1_epi32(static_cast<int>(0xffff0000U)); }
};

}  // namespace switchyard::cpu
