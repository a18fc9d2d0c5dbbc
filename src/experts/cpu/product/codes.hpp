#pragma once

// Codes of stored weights as bf16 numbers, by tables in registers: an exact step, but for e4m3,
// int4 and NVFP4 the one rounding that decode() has. For any vector type V with byte shuffles.
//
// A register holds four depths of half a panel's columns (StoredPanel): where two codes share a
// byte, of both halves. Two look-ups give the low and high bytes of bf16 numbers, and unpacking
// them gives two depths of a column side by side in a lane: what a bf16 panel has, and from there
// two floats.
//
// MXFP4: the table has the values times 2^125, and the exponent of the column's scale is
// subtracted with saturation, so that 0 stays 0. e4m3: with a scale s a code is (table[mantissa]
// with its rounding) * 2^exponent, for rounding commutes with powers of two while nothing leaves
// the range of normal numbers: eight values for the eight mantissas and eight for the numbers below
// 2^-6. Scales so large or small that something does leave it take plain code.
//
// int4 and NVFP4: the table has what a code means before its scale, in bf16; two floats of it,
// times the scales of the columns, are rounded as decode() does. Where an instruction rounds to
// bf16 (V::kRoundsToBF16) codes become floats by one look-up in sixteen lanes, and what was rounded
// is put in order afterwards: 9 instead of 18 instructions for 32 numbers.

#include "experts/cpu/kernels/kernels.hpp"

namespace switchyard::cpu {

/// Readers of a panel's codes. Each goes to a depth, a multiple of 4, by go_to(), which says how
/// many depths from there on share its scales; is `usual` where four() may be asked for what the
/// codes mean: pairs[half][i] has depths 2i and 2i + 1 of a half's columns.
template <class V>
struct Codes {
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
    /// Of all bytes of `index`: the first two depths, and the next two.
    [[gnu::always_inline]] void look_up(Bits index, Bits (&pairs)[2]) const {
      const Bits l = V::look_up(low, index);
      const Bits h = V::look_up(high, index);
      pairs[0] = V::low_words(l, h);
      pairs[1] = V::high_words(l, h);
    }
  };

  class Mxfp4 {
   public:
    static constexpr Storage kStorage = Storage::kMxfp4;
    static constexpr std::int64_t kFourBytes = kBytes;  ///< Of what four() reads.
    static constexpr bool kFloats = false;              ///< Words are all that there is to do.

    Mxfp4(const std::byte* panel, const Int4Form& /*int4*/) : panel_(panel) {}

    [[gnu::always_inline]] std::int64_t go_to(std::int64_t k) {
      const std::byte* group = panel_ + k / kGroup * kGroupBytes;
      codes = group + kCols + k % kGroup / 4 * kBytes;
      usual = V::are_within(kLeast, kMost, group);
      for (int half = 0; half < 2; ++half) {
        below_[half] = V::exponents_below(kMost, group + half * kWidth);
      }
      return kGroup - k % kGroup;
    }
    [[gnu::always_inline]] void four(const std::byte* from, Bits (&pairs)[2][2]) const {
      const Bits both = V::load_bits(from);
      const Bits index[2] = {V::both(both, V::every_byte(15)), V::high_nibbles(both)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        values_.look_up(index[half], pairs[half]);
        for (Bits& pair : pairs[half]) pair = V::subtract_words(pair, below_[half]);
      }
    }

    const std::byte* codes = nullptr;
    bool usual = false;

   private:
    static constexpr std::int64_t kGroup = 32;
    static constexpr std::int64_t kGroupBytes = kCols * 17;
    static constexpr int kLeast = 2;   // 0.5 * 2^(2 - 127) is normal
    static constexpr int kMost = 252;  // 6 * 2^(252 - 127) is finite
    // 0, 0.5, 1, 1.5, 2, 3, 4, 6, times 2^125; -0 gives the sums of 0.
    static constexpr std::uint16_t kValues[16] = {0,      0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0,
                                                  0x7f00, 0x7f40, 0,      0xfd80, 0xfe00, 0xfe40,
                                                  0xfe80, 0xfec0, 0xff00, 0xff40};
    const std::byte* panel_;
    Table values_{kValues};
    Bits below_[2]{};
  };

  /// Codes of e4m3 with one scale: half a block of them.
  class E4m3Half {
   public:
    explicit E4m3Half(float scale) {
      // By index m the scale's multiple of m * 2^-9, by 8 + m that of (8 + m) * 2^-9 without the
      // exponent 1 that the code will add. As vectors all the way: bytes that are stored one by one
      // and read as a vector took as long as the block they are for.
      alignas(64) static constexpr float kNumbers[16] = {
          0x0p-9F, 0x1p-9F, 0x2p-9F, 0x3p-9F, 0x4p-9F, 0x5p-9F, 0x6p-9F, 0x7p-9F,
          0x8p-9F, 0x9p-9F, 0xap-9F, 0xbp-9F, 0xcp-9F, 0xdp-9F, 0xep-9F, 0xfp-9F};
      constexpr std::uint32_t kOne = 0x80;  // an exponent's unit in bf16
      alignas(64) static constexpr std::uint32_t kTaken[16] = {
          0, 0, 0, 0, 0, 0, 0, 0, kOne, kOne, kOne, kOne, kOne, kOne, kOne, kOne};
      V::table_of_products(kNumbers, kTaken, scale, values_.low, values_.high);
    }
    [[gnu::always_inline]] void four(const std::byte* from, Bits (&pairs)[2]) const {
      const Bits code = V::load_bits(from);
      // The code itself below 8, where there is no exponent; else 8 + mantissa, which is less.
      values_.look_up(V::smaller(V::both(code, V::every_byte(0x7f)),
                                 V::either(V::both(code, V::every_byte(7)), V::every_byte(8))),
                      pairs);
      const Bits zero = V::every_byte(0);
      const Bits above[2] = {V::shift_signed(V::low_words(zero, code)),
                             V::shift_signed(V::high_words(zero, code))};
      const Bits sign_and_exponent = V::every_word(0x8780);
      for (int i = 0; i < 2; ++i) {
        pairs[i] = V::add_words(pairs[i], V::both(above[i], sign_and_exponent));
      }
    }

   private:
    Table values_;
  };

  class E4m3 {
   public:
    static constexpr Storage kStorage = Storage::kE4M3;
    static constexpr std::int64_t kFourBytes = 2 * kBytes;
    static constexpr std::int64_t kBlock = 128;
    static constexpr std::int64_t kBlockBytes = 8 + kBlock * kCols;

    E4m3(const std::byte* panel, const Int4Form& /*int4*/) : panel_(panel) {}

    [[gnu::always_inline]] std::int64_t go_to(std::int64_t k) {
      const std::byte* block = panel_ + k / kBlock * kBlockBytes;
      codes = block + 8 + k % kBlock * kCols;
      const auto* scales = reinterpret_cast<const float*>(block);
      usual = is_usual(scales[0]) && is_usual(scales[1]);
      halves_[0] = E4m3Half(scales[0]);
      halves_[1] = E4m3Half(scales[1]);
      return kBlock - k % kBlock;
    }
    [[gnu::always_inline]] void four(const std::byte* from, Bits (&pairs)[2][2]) const {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) halves_[half].four(from + half * kBytes, pairs[half]);
    }

    const std::byte* codes = nullptr;
    bool usual = false;

   private:
    const std::byte* panel_;
    E4m3Half halves_[2]{E4m3Half(1), E4m3Half(1)};
  };

  /// What int4 and NVFP4 share: a number before its scale, and the scales of a group for the
  /// columns of either half. kShift: something is added to a number before.
  template <bool kShift>
  struct Scaled {
    static constexpr std::int64_t kFourBytes = kBytes;
    static constexpr bool kFloats = true;  ///< Numbers are floats in between.
    static constexpr bool kShifted = kShift;

    explicit Scaled(const std::uint16_t (&numbers)[16]) : words(numbers) {
      if constexpr (V::kRoundsToBF16) floats_ = V::sixteen_bf16(numbers);
    }
    [[gnu::always_inline]] void four(const std::byte* from, Bits (&pairs)[2][2]) const {
      const Bits lanes = V::load_bits(from);
      half_of<0>(lanes, pairs[0]);
      half_of<1>(lanes, pairs[1]);
    }

    const std::byte* codes = nullptr;
    bool usual = true;
    Table words;
    Reg shift[2]{}, scale[2]{};  ///< What is added to a number, what the sum is multiplied with.

   protected:
    /// What four() takes, of the scales that are there.
    [[gnu::always_inline]] void put_in_order() {
      if constexpr (V::kRoundsToBF16) {
        for (int half = 0; half < 2; ++half) {
          scales_[half][0] = V::of_even_columns(scale[half]);
          scales_[half][1] = V::of_odd_columns(scale[half]);
          if constexpr (kShift) {
            shifts_[half][0] = V::of_even_columns(shift[half]);
            shifts_[half][1] = V::of_odd_columns(shift[half]);
          }
        }
      }
    }

   private:
    /// Byte j of lane l: depth l / 2 % 2 * 2 + j % 2, column l / 4 * 4 + l % 2 * 2 + j / 2.
    template <int kHalf>
    [[gnu::always_inline]] void half_of(Bits lanes, Bits (&pairs)[2]) const {
      const auto number = [&]<int kByte>() {
        Reg value = V::number_of(floats_, V::template shifted<8 * kByte + 4 * kHalf>(lanes));
        if constexpr (kShift) value = V::add(value, shifts_[kHalf][kByte / 2]);
        return V::mul(value, scales_[kHalf][kByte / 2]);
      };
      const Bits even =
          V::rounded(number.template operator()<0>(), number.template operator()<1>());
      const Bits odd = V::rounded(number.template operator()<2>(), number.template operator()<3>());
      pairs[0] = V::first_pairs(even, odd);
      pairs[1] = V::second_pairs(even, odd);
    }

    Reg floats_{};
    Reg shifts_[2][2]{}, scales_[2][2]{};
  };

  template <bool kZeroPoints>
  class Int4 : public Scaled<kZeroPoints> {
   public:
    static constexpr Storage kStorage = Storage::kInt4;

    Int4(const std::byte* panel, const Int4Form& int4)
        : Scaled<kZeroPoints>(kValues),
          panel_(panel),
          group_(int4.group),
          group_bytes_(kHead + int4.group * kWidth),
          f16_(int4.scale == DType::kF16) {}

    [[gnu::always_inline]] std::int64_t go_to(std::int64_t k) {
      const std::byte* group = panel_ + k / group_ * group_bytes_;
      this->codes = group + kHead + k % group_ * kWidth;
      this->usual = true;
      for (int half = 0; half < 2; ++half) {
        const std::byte* at = group + 2 * half * kWidth;
        this->scale[half] = f16_ ? V::from_f16(at) : V::from_bf16(at);
        if constexpr (kZeroPoints) {
          const Reg zero = V::from_nibbles(group + 2 * kCols, 4 * half);
          this->shift[half] = V::sub(V::set(8.0F), zero);
        }
        // The instruction that rounds takes numbers below normal ones for 0.
        if constexpr (V::kRoundsToBF16) {
          this->usual = this->usual && V::are_normal(this->scale[half]);
        }
      }
      this->put_in_order();
      return group_ - k % group_;
    }

   private:
    // -8 to 7: what is added is 8 less the zero point.
    static constexpr std::uint16_t kValues[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                                  0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040,
                                                  0x4080, 0x40a0, 0x40c0, 0x40e0};
    static constexpr std::int64_t kHead = 2 * kCols + (kZeroPoints ? kWidth : 0);
    const std::byte* panel_;
    std::int64_t group_, group_bytes_;
    bool f16_;
  };

  class Nvfp4 : public Scaled<false> {
   public:
    static constexpr Storage kStorage = Storage::kNvfp4;

    Nvfp4(const std::byte* panel, const Int4Form& /*int4*/)
        : Scaled<false>(kValues), panel_(panel) {
      const auto* factors = reinterpret_cast<const float*>(panel);
      this->usual = is_usual(factors[0]) && is_usual(factors[1]);
      for (int half = 0; half < 2; ++half) factor_[half] = V::set(factors[half] * kRaise);
    }

    [[gnu::always_inline]] std::int64_t go_to(std::int64_t k) {
      const std::byte* group = panel_ + kBefore + k / 32 * kGroupBytes;
      this->codes = group + kHead + k % 32 * kWidth;
      for (int half = 0; half < 2; ++half) {
        const std::byte* at = group + k % 32 / kShare * kCols + half * kWidth;
        this->scale[half] = V::mul(V::from_e4m3(at), factor_[half]);
      }
      this->put_in_order();
      return kShare - k % kShare;
    }

   private:
    static constexpr std::uint16_t kValues[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                                  0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                                  0xc000, 0xc040, 0xc080, 0xc0c0};
    static constexpr std::int64_t kBefore = 8;
    static constexpr std::int64_t kShare = 16;  ///< Depths of a scale.
    static constexpr std::int64_t kHead = 2 * kCols;
    static constexpr std::int64_t kGroupBytes = kHead + 32 * kWidth;
    /// Scales come as f16 and so 2^8 too small: the factor takes it over, where it can.
    static constexpr float kRaise = 0x1p8F;
    const std::byte* panel_;
    Reg factor_[2]{};
  };

  /// Calls `of` with the reader of panels stored so as its argument for a template.
  template <class Function>
  static void with_reader(Storage storage, const Int4Form& int4, const Function& of) {
    switch (storage) {
      case Storage::kE4M3: return of.template operator()<E4m3>();
      case Storage::kInt4:
        return int4.zero_points ? of.template operator()<Int4<true>>()
                                : of.template operator()<Int4<false>>();
      case Storage::kNvfp4: return of.template operator()<Nvfp4>();
      default: return of.template operator()<Mxfp4>();
    }
  }

  /// All products with codes of e4m3, 2^-9 to 448, are normal numbers, and halves of them.
  static bool is_usual(float scale) {
    const float size = scale < 0 ? -scale : scale;
    return size >= 0x1p-116F && size < 0x1p119F;
  }
};

}  // namespace switchyard::cpu
