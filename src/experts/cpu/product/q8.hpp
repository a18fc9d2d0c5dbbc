#pragma once

// 8-bit weights: whole numbers, summed exactly within groups of 32 along the reduction.
//
// A row is cut into the same groups and stored as 15-bit numbers and a scale of its own (the values
// of a group keep 2^-16 of its largest: far finer than the weights, which keep 2^-8). Then
// sum += (row scale * weight scale) * float(sum of products), group by group in ascending depth.
// Widening each weight to float instead took three times as many instructions, and one row per
// expert was no longer bound by memory (Zen 3, 2026-11-21).

#include "experts/cpu/product/product.hpp"

namespace switchyard::cpu {

inline constexpr std::int64_t kQ8Pairs = kQ8Group / 2;

/// Weights [depth/32]{[columns/2][2] bf16 scales, [16][columns][2] int8}, the scales of the two
/// halves of the columns in pairs; rows, per block, [depth/32]{[16][rows][2] int16, [rows] float
/// scales}.
template <class V>
struct Q8Tile {
  static constexpr std::int64_t kCols = 2 * V::kWidth;
  static constexpr std::int64_t kStepBytes = kCols * kQ8GroupBytes;
  static constexpr std::int64_t kStepRowBytes = 2 * kQ8Group + 4;
  static constexpr std::int64_t kAheadBytes = 2 * V::kAheadBytes;

  template <int kRows, int kPanels>
  static void run(const TileArgs& args) {
    const std::byte* a = args.a;
    const std::byte* weights = args.weights;
    const std::byte* ahead = args.ahead.from;
    for (std::int64_t step = 0; step < args.steps; ++step) {
      group<kRows, kPanels>(args, a, weights, ahead, args.resume || step > 0);
      a += kRows * kStepRowBytes;
      weights += kStepBytes;
      ahead += args.ahead.step;
    }
  }

 private:
  template <int kRows, int kPanels>
  static void group(const TileArgs& args, const std::byte* a, const std::byte* weights,
                    const std::byte* ahead, bool resume) {
    using Int = typename V::Int;
    Int sum[kPanels][kRows][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sum[p][r][0] = sum[p][r][1] = V::int_zero();
    }
    constexpr int kLines = static_cast<int>((kStepBytes + 63) / 64);
#pragma GCC unroll 4
    for (int pair = 0; pair < kQ8Pairs; ++pair) {
      // All panels of the next steps, spread over the pairs: with 2 and 3 rows 10 to 20 % faster.
      if (pair < kLines) {
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) V::prefetch(ahead + p * args.panel_bytes + pair * 64);
      }
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        const std::byte* values = weights + p * args.panel_bytes + kCols * 2 + pair * kCols * 2;
        const Int b0 = V::widen_i8(values);
        const Int b1 = V::widen_i8(values + kCols);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Int x = V::broadcast_pair(a + 4 * (pair * kRows + r));
          sum[p][r][0] = V::add_products(x, b0, sum[p][r][0]);
          sum[p][r][1] = V::add_products(x, b1, sum[p][r][1]);
        }
      }
    }
    const auto* row_scale = reinterpret_cast<const float*>(a + kRows * 2 * kQ8Group);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      const std::byte* scales = weights + p * args.panel_bytes;
      const typename V::Reg scale[2] = {V::first_bf16(scales), V::second_bf16(scales)};
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        float* to = args.out + p * args.out_panel + r * kCols;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half, to += V::kWidth) {
          const auto factor = V::mul(V::broadcast(row_scale + r), scale[half]);
          V::store(to,
                   V::fma(factor, V::to_float(sum[p][r][half]), resume ? V::load(to) : V::zero()));
        }
      }
    }
  }
};

/// Rows [count][depth] of float into a block of 15-bit groups. A group with a value that is not
/// finite gets a scale that is not a number: nothing is hidden.
template <class V>
void quantize_rows(const QuantizeRowsArgs& args) {
  constexpr int kVectors = static_cast<int>(kQ8Group) / V::kWidth;
  constexpr float kMost = 32767.0F;
  auto* out = static_cast<std::byte*>(args.out);
  for (std::int64_t first = 0; first < args.depth; first += kQ8Group) {
    auto* pairs = reinterpret_cast<std::uint32_t*>(out);
    auto* scales = reinterpret_cast<float*>(out + args.count * 2 * kQ8Group);
    for (std::int64_t r = 0; r < args.count; ++r) {
      const float* row = args.rows + r * args.depth + first;
      auto largest = V::zero();
      auto poison = V::zero();
      for (int i = 0; i < kVectors; ++i) {
        const auto x = V::load(row + i * V::kWidth);
        largest = V::max(V::abs(x), largest);
        poison = V::fma(x, V::zero(), poison);
      }
      float lanes[2 * V::kWidth];
      V::store(lanes, largest);
      V::store(lanes + V::kWidth, poison);
      float most = 0;
      float sum = 0;
      for (int i = 0; i < V::kWidth; ++i) {
        most = lanes[i] > most ? lanes[i] : most;
        sum += lanes[V::kWidth + i];
      }
      scales[r] = most / kMost + sum;
      // Below that the inverse would overflow; such values are as good as zero.
      const auto inverse = V::set(most > 1e-30F && sum == 0 ? kMost / most : 0.0F);
      std::int32_t values[kQ8Group];
      for (int i = 0; i < kVectors; ++i) {
        V::store_rounded(values + i * V::kWidth, V::mul(V::load(row + i * V::kWidth), inverse));
      }
      for (std::int64_t pair = 0; pair < kQ8Pairs; ++pair) {
        pairs[pair * args.count + r] = (static_cast<std::uint32_t>(values[2 * pair]) & 0xffffU) |
                                       (static_cast<std::uint32_t>(values[2 * pair + 1]) << 16);
      }
    }
    out += args.count * (2 * kQ8Group + 4);
  }
}

}  // namespace switchyard::cpu
