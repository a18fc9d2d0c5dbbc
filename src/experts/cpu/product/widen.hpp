#pragma once

// Stored weights to floats by tables in registers: an exact step, but for e4m3 the one rounding
// that decode() has. For any vector type V with byte shuffles.
//
// A register holds four depths of half a panel's columns (StoredPanel): where two codes share a
// byte, of both halves. Two look-ups give the low and high bytes of bf16 numbers, and unpacking
// them gives two depths of a column side by side in a lane: what a bf16 panel has, and from there
// two floats.
//
// MXFP4 -> bf16: the table has the values times 2^125, and the exponent of the column's scale is
// subtracted with saturation, so that 0 stays 0. e4m3 -> bf16: with a scale s a code is
// (table[mantissa] with its rounding) * 2^exponent, for rounding commutes with powers of two while
// nothing leaves the range of normal numbers: eight values for the eight mantissas and eight for
// the numbers below 2^-6. Scales so large or small that something does leave it take plain code.
//
// int4 and NVFP4: the table has what a code means before its scale, in bf16; two floats of it,
// times the scales of the columns, are rounded as decode() does.

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

  /// Depths k and k + 1 (k even) of a half.
  template <DType kTo>
  static void put_floats(std::byte* out, std::int64_t k, int half, Reg first, Reg second) {
    if constexpr (kTo == DType::kBF16) {
      V::store_bits(out + (k / 2 * kCols + half * kWidth) * 4, V::pairs_of(first, second));
    } else {
      constexpr std::int64_t kSize = kTo == DType::kF32 ? 4 : 2;
      const Reg values[2] = {first, second};
      for (int i = 0; i < 2; ++i) {
        std::byte* to = out + ((k + i) * kCols + half * kWidth) * kSize;
        if constexpr (kTo == DType::kF32) {
          V::store(reinterpret_cast<float*>(to), values[i]);
        } else {
          V::store_f16(to, values[i]);
        }
      }
    }
  }

  /// The same of numbers that bf16 has; `scale` is multiplied with where kScaled, but not to bf16.
  template <DType kTo, bool kScaled>
  static void put(std::byte* out, std::int64_t k, int half, Bits pairs, Reg scale) {
    if constexpr (kTo == DType::kBF16) {
      V::store_bits(out + (k / 2 * kCols + half * kWidth) * 4, pairs);
    } else {
      Reg values[2] = {V::first_of(pairs), V::second_of(pairs)};
      if constexpr (kScaled) {
        for (Reg& value : values) value = V::mul(value, scale);
      }
      put_floats<kTo>(out, k, half, values[0], values[1]);
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

  /// Of a group of int4 or NVFP4, for the columns of either half: what is added to what a code
  /// means, and what the sum is multiplied with.
  struct Scales {
    Reg shift[2];
    Reg scale[2];
  };

  /// `depth` depths, a multiple of 4, of both halves.
  template <DType kTo, bool kShifted>
  static void scaled(const std::byte* codes, const Table& values, const Scales& scales,
                     std::int64_t depth, std::int64_t ahead, std::byte* out) {
    const Bits low_nibble = V::every_byte(15);
    for (std::int64_t four = 0; four < depth; four += 4, codes += kBytes) {
      V::prefetch(codes + ahead);
      const Bits shared = V::load_bits(codes);
      const Bits index[2] = {V::both(shared, low_nibble), V::high_nibbles(shared)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Bits low = V::look_up(values.low, index[half]);
        const Bits high = V::look_up(values.high, index[half]);
        const Bits pairs[2] = {V::low_words(low, high), V::high_words(low, high)};
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          Reg first = V::first_of(pairs[i]);
          Reg second = V::second_of(pairs[i]);
          if constexpr (kShifted) {
            first = V::add(first, scales.shift[half]);
            second = V::add(second, scales.shift[half]);
          }
          put_floats<kTo>(out, four + 2 * i, half, V::mul(first, scales.scale[half]),
                          V::mul(second, scales.scale[half]));
        }
      }
    }
  }

  template <DType kTo, bool kZeroPoints>
  static void int4_groups(const WidenArgs& args) {
    // -8 to 7: what is added is 8 less the zero point.
    constexpr std::uint16_t kValues[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                           0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040,
                                           0x4080, 0x40a0, 0x40c0, 0x40e0};
    constexpr std::int64_t kHead = 2 * kCols + (kZeroPoints ? kWidth : 0);
    const std::int64_t of_group = args.int4.group;
    const std::int64_t group_bytes = kHead + of_group * kWidth;
    const std::byte* group = args.panel + args.first / of_group * group_bytes;
    const Table values(kValues);
    const bool is_f16 = args.int4.scale == DType::kF16;
    std::byte* out = args.out;
    std::int64_t first = args.first % of_group;
    for (std::int64_t left = args.depth; left > 0; first = 0, group += group_bytes) {
      const std::int64_t depth = left < of_group - first ? left : of_group - first;
      Scales scales{};
      for (int half = 0; half < 2; ++half) {
        const std::byte* at = group + 2 * half * kWidth;
        scales.scale[half] = is_f16 ? V::from_f16(at) : V::from_bf16(at);
        if constexpr (kZeroPoints) {
          const Reg zero = V::from_nibbles(group + 2 * kCols, 4 * half);
          scales.shift[half] = V::sub(V::set(8.0F), zero);
        }
      }
      scaled<kTo, kZeroPoints>(group + kHead + first * kWidth, values, scales, depth,
                               args.depth * kWidth, out);
      left -= depth;
      out += depth * kCols * kSizeOf<kTo>;
    }
  }

  template <DType kTo>
  static void int4(const WidenArgs& args) {
    if (args.int4.zero_points) return int4_groups<kTo, true>(args);
    int4_groups<kTo, false>(args);
  }

  template <DType kTo>
  static void nvfp4(const WidenArgs& args) {
    constexpr std::uint16_t kValues[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                           0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                           0xc000, 0xc040, 0xc080, 0xc0c0};
    constexpr std::int64_t kBefore = 8;
    constexpr std::int64_t kHead = 2 * kCols;
    constexpr std::int64_t kGroupBytes = kHead + 32 * kWidth;
    // Scales come as f16 and so 2^8 too small: the factor takes it over, where it can.
    constexpr float kRaise = 0x1p8F;
    const auto* factors = reinterpret_cast<const float*>(args.panel);
    if (!is_usual(factors[0]) || !is_usual(factors[1])) {
      widen_exactly(Storage::kNvfp4, kTo, kCols, args);
      return;
    }
    const Reg factor[2] = {V::set(factors[0] * kRaise), V::set(factors[1] * kRaise)};
    const Table values(kValues);
    const std::byte* group = args.panel + kBefore + args.first / 32 * kGroupBytes;
    std::byte* out = args.out;
    for (std::int64_t k = 0; k < args.depth; k += 32, group += kGroupBytes) {
      for (int part = 0; part < 2; ++part, out += 16 * kCols * kSizeOf<kTo>) {
        Scales scales{};
        for (int half = 0; half < 2; ++half) {
          scales.scale[half] =
              V::mul(V::from_e4m3(group + part * kCols + half * kWidth), factor[half]);
        }
        scaled<kTo, false>(group + kHead + part * 16 * kWidth, values, scales, 16,
                           args.depth * kWidth, out);
      }
    }
  }

 private:
  static constexpr std::uint32_t kOne = 0x80;  ///< An exponent's unit in bf16.
  template <DType kTo>
  static constexpr std::int64_t kSizeOf = kTo == DType::kF32 ? 4 : 2;

  /// All products with codes, 2^-9 to 448, are normal numbers.
  static bool is_usual(float scale) {
    const float size = scale < 0 ? -scale : scale;
    return size >= 0x1p-117F && size < 0x1p119F;
  }
};

template <class V, DType kTo>
WidenFunction widening_to(Storage storage) {
  using W = Widening<V>;
  switch (storage) {
    case Storage::kE4M3: return W::template e4m3<kTo>;
    case Storage::kInt4: return W::template int4<kTo>;
    case Storage::kNvfp4: return W::template nvfp4<kTo>;
    default: return W::template mxfp4<kTo>;
  }
}

template <class V>
WidenFunction find_widening(DType dtype, Storage storage) {
  switch (dtype) {
    case DType::kF32: return widening_to<V, DType::kF32>(storage);
    case DType::kBF16: return widening_to<V, DType::kBF16>(storage);
    default: return widening_to<V, DType::kF16>(storage);
  }
}

}  // namespace switchyard::cpu
