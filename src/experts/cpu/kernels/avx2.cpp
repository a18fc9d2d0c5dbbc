// The kernels on 256-bit vectors: tiles of 6 rows x 16 columns fill the 16 registers (12 sums, two
// weights, one broadcast), 16-bit weights are widened to float on the way.
#include <immintrin.h>

#include "experts/cpu/product/rows.hpp"
#include "experts/cpu/product/widen.hpp"

namespace switchyard::cpu {
namespace {

struct Avx2 {
  using Reg = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kMaxRows = 6;
  /// Eight chains of fma hide its latency of four cycles on two pipes.
  static constexpr int panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  static constexpr std::int64_t kPieceBytes = 16 << 10;
  /// With one block: from so many rows on, so far ahead. Farther lost up to 20 % with 3 to 6 rows.
  static constexpr int ahead_rows() { return 1; }
  static constexpr std::int64_t kAheadBytes = 1 << 10;

  static void prefetch(const std::byte* p) { _mm_prefetch(p, _MM_HINT_T1); }
  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg set(float x) { return _mm256_set1_ps(x); }
  static Reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Reg a) { _mm256_storeu_ps(p, a); }
  static void stream(float* p, Reg a) { _mm256_stream_ps(p, a); }
  /// 2 * kWidth of them, rounded.
  using Words = __m256i;
  static Words bf16_words(Reg a, Reg b) {
    const auto words = [](Reg x) {
      return _mm256_srli_epi32(_mm256_castps_si256(round_bf16(x)), 16);
    };
    // Within 128 bits packing takes turns: put into order.
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(words(a), words(b)), 0xd8);
  }
  static Words f16_words(Reg a, Reg b) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(b, kNearest), _mm256_cvtps_ph(a, kNearest));
  }
  static void store_words(std::byte* p, Words a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
  }
  static void stream_words(std::byte* p, Words a) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), a);
  }
  static void keep(Reg& a) { asm volatile("" : "+x"(a)); }
  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg exact_fma(Reg a, Reg b, Reg c) { return fma(a, b, c); }
  static Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static Reg abs(Reg a) { return _mm256_andnot_ps(set(-0.0F), a); }
  static Reg round(Reg a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Reg pow2(Reg n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static Reg select_negative(Reg x, Reg negative, Reg other) {
    return _mm256_blendv_ps(other, negative, x);
  }
  static Reg round_bf16(Reg a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i kept = _mm256_and_si256(rounded_up(a), high_half());
    // The carry would turn a NaN into something else: quiet it instead.
    const __m256i nan =
        _mm256_or_si256(_mm256_and_si256(bits, high_half()), _mm256_set1_epi32(0x400000));
    return _mm256_blendv_ps(_mm256_castsi256_ps(kept), _mm256_castsi256_ps(nan),
                            _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
  static Reg round_f16(Reg a) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static float widen_one(std::uint16_t bits, DType dtype) {
    if (dtype == DType::kF16) return _cvtsh_ss(bits);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits) << 16)));
  }
  static Reg first_bf16(const std::byte* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits(p), 16));
  }
  static Reg second_bf16(const std::byte* p) {
    return _mm256_castsi256_ps(_mm256_and_si256(bits(p), high_half()));
  }
  static Reg from_f16(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  using Int = __m256i;
  static Int int_zero() { return _mm256_setzero_si256(); }
  static Int widen_i8(const std::byte* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Int broadcast_pair(const std::byte* p) {
    return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(p)));
  }
  static Int add_products(Int a, Int b, Int c) {
    return _mm256_add_epi32(c, _mm256_madd_epi16(a, b));
  }
  static Reg to_float(Int a) { return _mm256_cvtepi32_ps(a); }
  static void store_rounded(std::int32_t* p, Reg a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvtps_epi32(a));
  }

  /// Stored weights on their way to floats: bytes, and pairs of bf16.
  static constexpr bool kRoundsToBF16 = false;  ///< By an instruction.
  using Bits = __m256i;
  static Bits load_bits(const std::byte* p) { return bits(p); }
  static void store_bits(std::byte* p, Bits a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
  }
  static Bits every_byte(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static Bits every_word(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
  static Bits table(const std::uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static Bits look_up(Bits table, Bits index) { return _mm256_shuffle_epi8(table, index); }
  static Bits both(Bits a, Bits b) { return _mm256_and_si256(a, b); }
  static Bits either(Bits a, Bits b) { return _mm256_or_si256(a, b); }
  static Bits smaller(Bits a, Bits b) { return _mm256_min_epu8(a, b); }
  static Bits high_nibbles(Bits a) { return both(_mm256_srli_epi16(a, 4), every_byte(15)); }
  static Bits low_words(Bits low, Bits high) { return _mm256_unpacklo_epi8(low, high); }
  static Bits high_words(Bits low, Bits high) { return _mm256_unpackhi_epi8(low, high); }
  static Bits shift_signed(Bits words) { return _mm256_srai_epi16(words, 4); }
  static Bits add_words(Bits a, Bits b) { return _mm256_add_epi16(a, b); }
  /// Not below 0.
  static Bits subtract_words(Bits a, Bits b) { return _mm256_subs_epu16(a, b); }
  static Reg first_of(Bits pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static Reg second_of(Bits pairs) { return _mm256_castsi256_ps(both(pairs, high_half())); }
  static void store_f16(std::byte* p, Reg a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  /// Rounded to bf16, the first of a pair in the low half of a lane; no NaN among them.
  static Bits pairs_of(Reg first, Reg second) {
    return either(_mm256_srli_epi32(rounded_up(first), 16), both(rounded_up(second), high_half()));
  }
  /// Scales of int4: kWidth of them, at any address.
  static Reg from_bf16(const std::byte* p) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  /// Four bits of each of kWidth bytes, from `bit` on, as numbers.
  static Reg from_nibbles(const std::byte* p, int bit) {
    const __m256i lanes =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return to_float(both(_mm256_srli_epi32(lanes, bit), _mm256_set1_epi32(15)));
  }
  /// kWidth of e4m3, times 2^-8: their bits where f16 has them.
  static Reg from_e4m3(const std::byte* p) {
    const __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i placed = _mm_srai_epi16(_mm_slli_epi16(words, 8), 1);
    return _mm256_cvtph_ps(_mm_and_si128(placed, _mm_set1_epi16(static_cast<short>(0xbf80))));
  }
  /// numbers * scale as bf16, less `taken`: the low bytes of all 16, and the high ones.
  static void table_of_products(const float (&numbers)[16], const std::uint32_t (&taken)[16],
                                float scale, Bits& low, Bits& high) {
    Bits words[2];
    for (std::int64_t i = 0; i < 2; ++i) {
      const __m256i rounded =
          _mm256_castps_si256(round_bf16(mul(load(numbers + 8 * i), set(scale))));
      words[i] =
          _mm256_sub_epi32(_mm256_srli_epi32(rounded, 16),
                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(taken + 8 * i)));
    }
    // Within 128 bits packing takes turns: put into order each time.
    const Bits all = _mm256_permute4x64_epi64(_mm256_packus_epi32(words[0], words[1]), 0xd8);
    const Bits bytes = _mm256_permute4x64_epi64(
        _mm256_packus_epi16(both(all, every_word(0xff)), _mm256_srli_epi16(all, 8)), 0xd8);
    low = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    high = _mm256_permute2x128_si256(bytes, bytes, 0x11);
  }
  /// (most - byte) << 7 in both words of each lane.
  static Bits exponents_below(int most, const std::byte* p) {
    const __m256i lanes =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i below = _mm256_sub_epi32(_mm256_set1_epi32(most), lanes);
    return either(_mm256_slli_epi32(below, 7), _mm256_slli_epi32(below, 23));
  }
  /// Whether 2 * kWidth bytes are within [least, most].
  static bool are_within(int least, int most, const std::byte* p) {
    const __m128i above = _mm_sub_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)),
                                       _mm_set1_epi8(static_cast<char>(least)));
    const __m128i limit = _mm_set1_epi8(static_cast<char>(most - least));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(above, limit), limit)) == 0xffff;
  }

 private:
  static __m256i bits(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  /// So that the high half is the number as bf16, to nearest even.
  static __m256i rounded_up(Reg a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
  static __m256i high_half() { return _mm256_set1_epi32(static_cast<int>(0xffff0000U)); }
};

}  // namespace

const Kernels* avx2_kernels(DType dtype, bool q8) {
  return find_float_kernels<Avx2>(CpuIsa::kAvx2, dtype, q8);
}

WidenFunction avx2_widening(DType dtype, Storage storage) {
  return find_widening<Avx2>(dtype, storage);
}

}  // namespace switchyard::cpu
