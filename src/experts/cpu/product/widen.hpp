#pragma once

// Stored weights to floats by tables in registers: an exact step, but for e4m3 the one rounding
// that decode() has. For any vector type V with byte shuffles.
//
// A register holds four depths of half a panel's columns (StoredPanel): of MXFP4 of both halves.
// Two look-ups give the low and high bytes of bf16 numbers, and unpacking them gives two depths of
// a column side by side in a lane: what a bf16 panel has, and from there two floats.
//
// MXFP4 -> bf16: the table has the values times 2^125, and the exponent of the column's scale is
// subtracted with saturation, so that 0 stays 0. e4m3 -> bf16: with a scale s a code is
// (table[mantissa] with its rounding) * 2^exponent, for rounding commutes with powers of two while
// nothing leaves the range of normal numbers: eight values for the eight mantissas and eight for
// the numbers below 2^-6. Scales so large or small that something does leave it take plain code.

#include "experts/cpu/kernels/kernels.hpp"

namespace switchyard::cpu {

template <class V>
struct Widening {
  using Bits = typename V::Bits;
  using Reg = typename V::Reg;
  static constexpr std::int64_t kWidth = V::kWidth;
  static constexpr std::int64_t kCols = 2 * kWidth;
  static constexpr std::int64_t kBytes = 4 * kWidth;  ///< Of a register.

  /// The low and the high bytes of sixteen bf16 numbers.
  struct Table {
    Bits low, high;
    Table() = default;
    Table(const std::uint16_t (&words)[16]) {  // NOLINT(google-explicit-constructor)
      std::uint8_t bytes[2][16];
      for (int i = 0; i < 16; ++i) {
        bytes[0][i] = static_cast<std::uint8_t>(words[i] & 0xffU);
        bytes[1][i] = static_cast<std::uint8_t>(words[i] >> 8);
      }
      low = V::table(bytes[0]);
      high = V::table(bytes[1]);
    }
  };

  /// Depths k and k + 1 (k even) of a half; `scale` is multiplied with where kScaled.
  template <DType kTo, bool kScaled>
  static void put(std::byte* out, std::int64_t k, int half, Bits pairs, Reg scale) {
    if constexpr (kTo == DType::kBF16) {
      V::store_bits(out + (k / 2 * kCols + half * kWidth) * 4, pairs);
    } else {
      constexpr std::int64_t kSize = kTo == DType::kF32 ? 4 : 2;
      Reg values[2] = {V::first_of(pairs), V::second_of(pairs)};
      for (int i = 0; i < 2; ++i) {
        if constexpr (kScaled) values[i] = V::mul(values[i], scale);
        std::byte* to = out + ((k + i) * kCols + half * kWidth) * kSize;
        if constexpr (kTo == DType::kF32) {
          V::store(reinterpret_cast<float*>(to), values[i]);
        } else {
          V::store_f16(to, values[i]);
        }
      }
    }
  }

  template <DType kTo>
  static void mxfp4(const WidenArgs& args) {
    constexpr std::int64_t kSize = kTo == DType::kF32 ? 4 : 2;
    constexpr std::int64_t kGroupBytes = kCols * 17;
    // 0, 0.5, 1, 1.5, 2, 3, 4, 6, times 2^125; -0 gives the sums of 0.
    constexpr std::uint16_t kValues[16] = {0,      0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0,
                                           0x7f00, 0x7f40, 0,      0xfd80, 0xfe00, 0xfe40,
                                           0xfe80, 0xfec0, 0xff00, 0xff40};
    constexpr int kLeast = 2;   // 0.5 * 2^(2 - 127) is normal
    constexpr int kMost = 252;  // 6 * 2^(252 - 127) is finite
    const Table values(kValues);
    const Bits low_nibble = V::every_byte(15);
    const std::byte* group = args.panel + args.first / 32 * kGroupBytes;
    const std::int64_t ahead = args.depth / 32 * kGroupBytes;
    std::byte* out = args.out;
    for (std::int64_t k = 0; k < args.depth; k += 32) {
      if (V::are_within(kLeast, kMost, group)) {
        const Bits below[2] = {V::exponents_below(kMost, group),
                               V::exponents_below(kMost, group + kWidth)};
        const std::byte* codes = group + kCols;
        for (std::int64_t four = 0; four < 32; four += 4, codes += kBytes) {
          V::prefetch(codes + ahead);
          const Bits both = V::load_bits(codes);
          const Bits index[2] = {V::both(both, low_nibble), V::high_nibbles(both)};
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            const Bits low = V::look_up(values.low, index[half]);
            const Bits high = V::look_up(values.high, index[half]);
            put<kTo, false>(out, four, half,
                            V::subtract_words(V::low_words(low, high), below[half]), Reg{});
            put<kTo, false>(out, four + 2, half,
                            V::subtract_words(V::high_words(low, high), below[half]), Reg{});
          }
        }
      } else {
        widen_exactly(Storage::kMxfp4, kTo, kCols,
                      {.panel = group, .first = 0, .depth = 32, .out = out});
      }
      group += kGroupBytes;
      out += 32 * kCols * kSize;
    }
  }

  /// What is looked up for e4m3 with a scale: by index m its multiple of m * 2^-9, by 8 + m that of
  /// (8 + m) * 2^-9 without the exponent 1 that the code will add. As vectors all the way: bytes
  /// that are stored one by one and read as a vector took as long as the block they are for.
  static Table e4m3_table(float scale) {
    alignas(64) static constexpr float kNumbers[16] = {
        0x0p-9F, 0x1p-9F, 0x2p-9F, 0x3p-9F, 0x4p-9F, 0x5p-9F, 0x6p-9F, 0x7p-9F,
        0x8p-9F, 0x9p-9F, 0xap-9F, 0xbp-9F, 0xcp-9F, 0xdp-9F, 0xep-9F, 0xfp-9F};
    alignas(64) static constexpr std::uint32_t kTaken[16] = {
        0, 0, 0, 0, 0, 0, 0, 0, kOne, kOne, kOne, kOne, kOne, kOne, kOne, kOne};
    Table table;
    V::table_of_products(kNumbers, kTaken, scale, table.low, table.high);
    return table;
  }

  /// `fours` times four depths of a half.
  template <DType kTo>
  static void e4m3_half(const std::byte* codes, int half, std::int64_t fours, float scale,
                        std::int64_t ahead, std::byte* out) {
    // Floats are multiplied with the scale themselves, which is the rounding of decode().
    constexpr bool kScaled = kTo != DType::kBF16;
    constexpr std::int64_t kSize = kTo == DType::kF32 ? 4 : 2;
    const Table values = e4m3_table(kScaled ? 1.0F : scale);
    const Reg factor = V::set(scale);
    const Bits zero = V::every_byte(0);
    const Bits magnitude = V::every_byte(0x7f);
    const Bits mantissa = V::every_byte(7);
    const Bits normal = V::every_byte(8);
    const Bits sign_and_exponent = V::every_word(0x8780);
    codes += half * kBytes;
    for (std::int64_t i = 0; i < fours; ++i, codes += 2 * kBytes, out += 4 * kCols * kSize) {
      V::prefetch(codes + ahead);
      const Bits code = V::load_bits(codes);
      // The code itself below 8, where there is no exponent; else 8 + mantissa, which is less.
      const Bits index =
          V::smaller(V::both(code, magnitude), V::either(V::both(code, mantissa), normal));
      const Bits low = V::look_up(values.low, index);
      const Bits high = V::look_up(values.high, index);
      const Bits above[2] = {V::shift_signed(V::low_words(zero, code)),
                             V::shift_signed(V::high_words(zero, code))};
      put<kTo, kScaled>(out, 0, half,
                        V::add_words(V::low_words(low, high), V::both(above[0], sign_and_exponent)),
                        factor);
      put<kTo, kScaled>(
          out, 2, half,
          V::add_words(V::high_words(low, high), V::both(above[1], sign_and_exponent)), factor);
    }
  }

  template <DType kTo>
  static void e4m3(const WidenArgs& args) {
    constexpr std::int64_t kBlock = 128;
    constexpr std::int64_t kBlockBytes = 8 + kBlock * kCols;
    constexpr std::int64_t kSize = kTo == DType::kF32 ? 4 : 2;
    const std::byte* block = args.panel + args.first / kBlock * kBlockBytes;
    std::byte* out = args.out;
    std::int64_t first = args.first % kBlock;
    for (std::int64_t left = args.depth; left > 0; first = 0, block += kBlockBytes) {
      const std::int64_t depth = left < kBlock - first ? left : kBlock - first;
      const auto* scales = reinterpret_cast<const float*>(block);
      if (kTo != DType::kBF16 || (is_usual(scales[0]) && is_usual(scales[1]))) {
        for (int half = 0; half < 2; ++half) {
          e4m3_half<kTo>(block + 8 + first * kCols, half, depth / 4, scales[half],
                         args.depth * kCols, out);
        }
      } else {
        widen_exactly(Storage::kE4M3, kTo, kCols,
                      {.panel = block, .first = first, .depth = depth, .out = out});
      }
      left -= depth;
      out += depth * kCols * kSize;
    }
  }

 private:
  static constexpr std::uint32_t kOne = 0x80;  ///< An exponent's unit in bf16.

  /// All products with codes, 2^-9 to 448, are normal numbers.
  static bool is_usual(float scale) {
    const float size = scale < 0 ? -scale : scale;
    return size >= 0x1p-117F && size < 0x1p119F;
  }
};

template <class V>
WidenFunction find_widening(DType dtype, Storage storage) {
  using W = Widening<V>;
  const bool e4m3 = storage == Storage::kE4M3;
  switch (dtype) {
    case DType::kF32: return e4m3 ? W::template e4m3<DType::kF32> : W::template mxfp4<DType::kF32>;
    case DType::kBF16:
      return e4m3 ? W::template e4m3<DType::kBF16> : W::template mxfp4<DType::kBF16>;
    default: return e4m3 ? W::template e4m3<DType::kF16> : W::template mxfp4<DType::kF16>;
  }
}

}  // namespace switchyard::cpu
