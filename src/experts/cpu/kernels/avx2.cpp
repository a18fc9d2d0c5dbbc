// The kernels on 256-bit vectors: tiles of 6 rows x 16 columns fill the 16 registers (12 sums, two
// weights, one broadcast), 16-bit weights are widened to float on the way.
#include <immintrin.h>

#include "experts/cpu/product/rows.hpp"

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
  static constexpr int kAheadRows = 1;
  static constexpr std::int64_t kAheadBytes = 1 << 10;

  static void prefetch(const std::byte* p) { _mm_prefetch(p, _MM_HINT_T1); }
  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg set(float x) { return _mm256_set1_ps(x); }
  static Reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Reg a) { _mm256_storeu_ps(p, a); }
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
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i kept = _mm256_and_si256(rounded, high_half());
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

 private:
  static __m256i bits(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static __m256i high_half() { return _mm256_set1_epi32(static_cast<int>(0xffff0000U)); }
};

}  // namespace

const Kernels* avx2_kernels(DType dtype, bool q8) {
  return find_float_kernels<Avx2>(CpuIsa::kAvx2, dtype, q8);
}

}  // namespace switchyard::cpu
