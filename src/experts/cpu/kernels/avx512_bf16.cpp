// bf16 by dot products of pairs: twice the rate of float fma on Zen 4, and no widening.
#include "experts/cpu/product/coded_rows.hpp"
#include "experts/cpu/product/pair_rows.hpp"
#include "experts/cpu/product/widen.hpp"

namespace switchyard::cpu {
namespace {

struct Here {};
using Pairs = Avx512Pairs<Here>;

/// [depth/2][columns][2] bf16, multiplied in pairs: sum += a0*b0 + a1*b1 as the instruction rounds.
struct PairWeights {
  using Unit = std::uint32_t;  ///< A pair.
  static constexpr Storage kStorage = Storage::kBF16;
  static constexpr int kUnitDepth = 2;
  static constexpr int kStepUnits = 1;
  static constexpr int kStepBytes = 2 * Pairs::kWidth * 4;

  static __m512 load(const std::byte* step, int, int half) {
    return Pairs::load(reinterpret_cast<const float*>(step) + half * Pairs::kWidth);
  }
  static __m512 broadcast(const Unit* a) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*a)));
  }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static void write(std::byte* to, __m512 a, __m512 b) {
    Pairs::store_words(to, Pairs::bf16_words(a, b));
  }
  static void stream(std::byte* to, __m512 a, __m512 b) {
    Pairs::stream_words(to, Pairs::bf16_words(a, b));
  }
};

using Type = RowType<Pairs, DType::kBF16>;

/// Adds to Pairs how stored weights become bf16 by the instruction that rounds.
struct Rounding : Pairs {
  static constexpr bool kRoundsToBF16 = true;

  static Reg sixteen_bf16(const std::uint16_t (&words)[16]) {
    return from_bf16(reinterpret_cast<const std::byte*>(words));
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

constexpr Kernels kBF16 = {.isa = CpuIsa::kAvx512Bf16,
                           .dtype = DType::kBF16,
                           .storage = PairWeights::kStorage,
                           .panel_cols = 2 * Pairs::kWidth,
                           .max_rows = Pairs::kMaxRows,
                           .fixed_blocks = false,
                           .depth_multiple = 2,
                           .element_bytes = 2,
                           .step_row_bytes = SumTile<Pairs, PairWeights>::kStepRowBytes,
                           .pack_rows = pack_rows<Pairs, Type, PairRows<Pairs>>,
                           .product = product<Pairs, SumTile<Pairs, PairWeights>>,
                           .activate = activate<Pairs, Type, PairRows<Pairs>>,
                           .quantize_rows = nullptr,
                           .reduce = reduce<Pairs>,
                           .gradient = activation_gradient<Pairs>,
                           .spin = spin<Pairs, PairWeights>,
                           .spin_flops = spin_flops<Pairs, PairWeights>(),
                           .read = read_bytes<Pairs>,
                           .writes_rows = true};

}  // namespace

const Kernels* avx512_bf16_kernels(DType dtype, bool q8) {
  return dtype == DType::kBF16 && !q8 ? &kBF16 : nullptr;
}

WidenFunction avx512_bf16_widening(Storage storage) {
  return widening_to<Rounding, DType::kBF16>(storage);
}

CodedRowsProduct avx512_bf16_coded_rows() {
  return {.most_rows = CodedRows<Rounding, PairWeights>::kMostRows,
          .product = CodedRows<Rounding, PairWeights>::product};
}

}  // namespace switchyard::cpu
