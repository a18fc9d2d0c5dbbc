#pragma once

// Few rows times stored weights without a panel in between: codes become numbers in registers and
// are multiplied there, each output one chain in ascending depth as in product(), so that the bits
// are those. Storing numbers and loading them again takes as long as making them. Nothing is
// fetched ahead: 512 bytes and 1 KiB made no difference on Zen 4, 2 and 4 KiB cost a quarter and
// more.

#include <utility>

#include "experts/cpu/product/codes.hpp"

namespace switchyard::cpu {

template <class V, class W>
struct CodedRows {
  using Bits = typename V::Bits;
  using Reg = typename V::Reg;
  using Unit = typename W::Unit;
  static constexpr std::int64_t kWidth = V::kWidth;
  static constexpr std::int64_t kCols = 2 * kWidth;
  static constexpr int kMostRows = 8;  ///< 16 sums; the rest is for codes.

  template <int kRows>
  [[gnu::always_inline]] static void add(const Unit* a, Bits first_half, Bits second_half,
                                         Reg (&sum)[kRows][2]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Reg x = W::broadcast(a + r);
      sum[r][0] = W::multiply_add(x, V::as_floats(first_half), sum[r][0]);
      sum[r][1] = W::multiply_add(x, V::as_floats(second_half), sum[r][1]);
    }
  }

  /// Depths `first` to `first` + 2 * `pairs`, whose scales are not usual.
  template <class Reader, int kRows>
  [[gnu::noinline]] static void add_exactly(const std::byte* panel, const Int4Form& int4,
                                            std::int64_t first, std::int64_t pairs, const Unit* a,
                                            Reg (&sum)[kRows][2]) {
    alignas(64) std::byte tile[4 * kCols * 2];
    for (std::int64_t i = 0; i < pairs; i += 2) {
      widen_exactly(
          Reader::kStorage, DType::kBF16, kCols,
          {.panel = panel, .first = first + 2 * i, .depth = 4, .out = tile, .int4 = int4});
      for (std::int64_t pair = 0; pair < 2 && i + pair < pairs; ++pair, a += kRows) {
        const std::byte* at = tile + pair * kCols * 4;
        add(a, V::load_bits(at), V::load_bits(at + kWidth * 4), sum);
      }
    }
  }

  template <class Reader, int kRows>
  static void run(const ProductArgs& args, const Int4Form& int4) {
    for (std::int64_t p = 0; p < args.panels; ++p) {
      const std::byte* panel = args.weights + p * args.panel_bytes;
      const auto* a = static_cast<const Unit*>(args.a);
      Reader reader(panel, int4);
      Reg sum[kRows][2];
      for (auto& of_row : sum) of_row[0] = of_row[1] = V::zero();
      for (std::int64_t k = 0; k < 2 * args.steps;) {
        const std::int64_t share = reader.go_to(k) / 2;
        const std::int64_t left = args.steps - k / 2;
        const std::int64_t pairs = share < left ? share : left;
        if (reader.usual) {
          const std::byte* codes = reader.codes;
          for (std::int64_t i = pairs / 2; i > 0;
               --i, codes += Reader::kFourBytes, a += 2 * kRows) {
            Bits numbers[2][2];
            reader.four(codes, numbers);
            add(a, numbers[0][0], numbers[1][0], sum);
            add(a + kRows, numbers[0][1], numbers[1][1], sum);
          }
          if (pairs % 2 != 0) {
            Bits numbers[2][2];
            reader.four(codes, numbers);
            add(a, numbers[0][0], numbers[1][0], sum);
          }
        } else {
          add_exactly<Reader>(panel, int4, k, pairs, a, sum);
          a += pairs * kRows;
        }
        k += 2 * pairs;
      }
      float* out = args.out + p * kRows * kCols;
      for (int r = 0; r < kRows; ++r) {
        V::store(out + r * kCols, sum[r][0]);
        V::store(out + r * kCols + kWidth, sum[r][1]);
      }
    }
  }

  template <class Reader, int... kRow>
  static void of(const ProductArgs& args, const Int4Form& int4,
                 std::integer_sequence<int, kRow...> /*rows*/) {
    static constexpr void (*kRun[])(const ProductArgs&,
                                    const Int4Form&) = {run<Reader, kRow + 1>...};
    kRun[args.blocks.rows() - 1](args, int4);
  }

  static void product(Storage storage, const ProductArgs& args, const Int4Form& int4) {
    Codes<V>::with_reader(storage, int4, [&]<class Reader>() {
      of<Reader>(args, int4, std::make_integer_sequence<int, kMostRows>());
    });
  }
};

}  // namespace switchyard::cpu
