#pragma once

// Stored weights in the order of a panel of the compute type: what multiply() makes in the
// first-level cache. For any vector type V with byte shuffles.

#include "experts/cpu/product/codes.hpp"

namespace switchyard::cpu {

template <class V>
struct Widening {
  using Bits = typename V::Bits;
  using Reg = typename V::Reg;
  using C = Codes<V>;
  static constexpr std::int64_t kWidth = C::kWidth;
  static constexpr std::int64_t kCols = C::kCols;
  static constexpr std::int64_t kBytes = C::kBytes;
  template <DType kTo>
  static constexpr std::int64_t kSizeOf = kTo == DType::kF32 ? 4 : 2;

  /// Depths k and k + 1 (k even) of a half.
  template <DType kTo>
  static void put_floats(std::byte* out, std::int64_t k, int half, Reg first, Reg second) {
    if constexpr (kTo == DType::kBF16) {
      V::store_bits(out + (k / 2 * kCols + half * kWidth) * 4, V::pairs_of(first, second));
    } else {
      const Reg values[2] = {first, second};
      for (int i = 0; i < 2; ++i) {
        std::byte* to = out + ((k + i) * kCols + half * kWidth) * kSizeOf<kTo>;
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

  /// Four depths of both halves.
  template <DType kTo, class Reader>
  [[gnu::always_inline]] static void put_four(const Reader& reader, const std::byte* codes,
                                              std::int64_t k, std::byte* out) {
    Bits pairs[2][2];
    reader.four(codes, pairs);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      put<kTo, false>(out, k, half, pairs[half][0], Reg{});
      put<kTo, false>(out, k + 2, half, pairs[half][1], Reg{});
    }
  }

  /// The same by floats times their scales.
  template <DType kTo, class Reader>
  [[gnu::always_inline]] static void put_four_scaled(const Reader& reader, const std::byte* codes,
                                                     std::int64_t k, std::byte* out) {
    const Bits shared = V::load_bits(codes);
    const Bits index[2] = {V::both(shared, V::every_byte(15)), V::high_nibbles(shared)};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Bits pairs[2];
      reader.words.look_up(index[half], pairs);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        Reg first = V::first_of(pairs[i]);
        Reg second = V::second_of(pairs[i]);
        if constexpr (Reader::kShifted) {
          first = V::add(first, reader.shift[half]);
          second = V::add(second, reader.shift[half]);
        }
        put_floats<kTo>(out, k + 2 * i, half, V::mul(first, reader.scale[half]),
                        V::mul(second, reader.scale[half]));
      }
    }
  }

  template <DType kTo, class Reader>
  static void both_halves(const WidenArgs& args) {
    Reader reader(args.panel, args.int4);
    const std::int64_t ahead = args.depth / 4 * Reader::kFourBytes;
    const std::int64_t end = args.first + args.depth;
    std::byte* out = args.out;
    for (std::int64_t first = args.first; first < end;) {
      const std::int64_t share = reader.go_to(first);
      const std::int64_t depth = share < end - first ? share : end - first;
      if (reader.usual) {
        const std::byte* codes = reader.codes;
        for (std::int64_t k = 0; k < depth; k += 4, codes += Reader::kFourBytes) {
          V::prefetch(codes + ahead);
          if constexpr (Reader::kFloats && !(kTo == DType::kBF16 && V::kRoundsToBF16)) {
            put_four_scaled<kTo>(reader, codes, k, out);
          } else {
            put_four<kTo>(reader, codes, k, out);
          }
        }
      } else {
        widen_exactly(
            Reader::kStorage, kTo, kCols,
            {.panel = args.panel, .first = first, .depth = depth, .out = out, .int4 = args.int4});
      }
      first += depth;
      out += depth * kCols * kSizeOf<kTo>;
    }
  }

  /// `fours` times four depths of a half.
  template <DType kTo>
  static void e4m3_half(const std::byte* codes, int half, std::int64_t fours, float scale,
                        std::int64_t ahead, std::byte* out) {
    // Floats are multiplied with the scale themselves, which is the rounding of decode().
    constexpr bool kScaled = kTo != DType::kBF16;
    const typename C::E4m3Half values(kScaled ? 1.0F : scale);
    const Reg factor = V::set(scale);
    codes += half * kBytes;
    for (std::int64_t i = 0; i < fours; ++i) {
      V::prefetch(codes + ahead);
      Bits pairs[2];
      values.four(codes, pairs);
      put<kTo, kScaled>(out, 0, half, pairs[0], factor);
      put<kTo, kScaled>(out, 2, half, pairs[1], factor);
      codes += 2 * kBytes;
      out += 4 * kCols * kSizeOf<kTo>;
    }
  }

  /// A half after the other: AVX2 has registers for the tables of one.
  template <DType kTo>
  static void e4m3(const WidenArgs& args) {
    constexpr std::int64_t kBlock = C::E4m3::kBlock;
    const std::byte* block = args.panel + args.first / kBlock * C::E4m3::kBlockBytes;
    std::byte* out = args.out;
    std::int64_t first = args.first % kBlock;
    for (std::int64_t left = args.depth; left > 0; first = 0, block += C::E4m3::kBlockBytes) {
      const std::int64_t depth = left < kBlock - first ? left : kBlock - first;
      const auto* scales = reinterpret_cast<const float*>(block);
      if (kTo != DType::kBF16 || (C::is_usual(scales[0]) && C::is_usual(scales[1]))) {
        for (int half = 0; half < 2; ++half) {
          e4m3_half<kTo>(block + 8 + first * kCols, half, depth / 4, scales[half],
                         args.depth * kCols, out);
        }
      } else {
        widen_exactly(Storage::kE4M3, kTo, kCols,
                      {.panel = block, .first = first, .depth = depth, .out = out});
      }
      left -= depth;
      out += depth * kCols * kSizeOf<kTo>;
    }
  }

  template <DType kTo>
  static void int4(const WidenArgs& args) {
    if (args.int4.zero_points) return both_halves<kTo, typename C::template Int4<true>>(args);
    both_halves<kTo, typename C::template Int4<false>>(args);
  }
};

template <class V, DType kTo>
WidenFunction widening_to(Storage storage) {
  using W = Widening<V>;
  switch (storage) {
    case Storage::kE4M3: return W::template e4m3<kTo>;
    case Storage::kInt4: return W::template int4<kTo>;
    case Storage::kNvfp4: return W::template both_halves<kTo, typename Codes<V>::Nvfp4>;
    default: return W::template both_halves<kTo, typename Codes<V>::Mxfp4>;
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
