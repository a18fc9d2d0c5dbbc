#pragma once

// A block of rows times a column panel, for any vector type V and any form of weights.
//
// Registers hold rows x (two vectors of) columns; each output is one chain of fma in ascending
// depth from +0. With one block the weights are streamed once, several panels side by side where
// rows alone would not hide the latency of the fma. With more blocks the depth is cut so that the
// piece of the panel stays in the first-level cache while all blocks pass over it; sums wait in
// `out` meanwhile, which changes no bit.

#include <utility>

#include "experts/cpu_kernels.hpp"

namespace switchyard::cpu {

/// [depth][columns] float.
template <class V>
struct F32Weights {
  using Unit = float;  ///< One element of a packed row: what is broadcast.
  using Step = int;    ///< What is loaded once for a step; here nothing.
  static constexpr Storage kStorage = Storage::kF32;
  static constexpr int kUnitDepth = 1;  ///< Values along the reduction in a Unit.
  static constexpr int kStepUnits = 1;  ///< Units in a step.
  static constexpr int kStepBytes = 2 * V::kWidth * 4;

  static Step begin(const std::byte*) { return 0; }
  static typename V::Reg load(Step, const std::byte* step, int, int half) {
    return V::load(reinterpret_cast<const float*>(step) + half * V::kWidth);
  }
  static typename V::Reg broadcast(const Unit* a) { return V::broadcast(a); }
  static typename V::Reg multiply_add(typename V::Reg a, typename V::Reg b, typename V::Reg c) {
    return V::fma(a, b, c);
  }
};

/// [depth/2][columns][2] bf16, widened exactly.
template <class V>
struct Bf16Weights : F32Weights<V> {
  static constexpr Storage kStorage = Storage::kBF16;
  static constexpr int kStepUnits = 2;
  static constexpr int kStepBytes = 2 * V::kWidth * 4;

  static typename V::Reg load(int, const std::byte* step, int unit, int half) {
    const std::byte* pairs = step + half * V::kWidth * 4;
    return unit == 0 ? V::first_bf16(pairs) : V::second_bf16(pairs);
  }
};

/// [depth][columns] f16, widened exactly.
template <class V>
struct F16Weights : F32Weights<V> {
  static constexpr Storage kStorage = Storage::kF16;
  static constexpr int kStepBytes = 2 * V::kWidth * 2;

  static typename V::Reg load(int, const std::byte* step, int, int half) {
    return V::from_f16(step + half * V::kWidth * 2);
  }
};

/// [depth/32]{[columns] float scales, [32][columns] int8}: a weight is float(scale * value).
template <class V>
struct Q8Weights : F32Weights<V> {
  struct Step {
    typename V::Reg scale[2];
  };
  static constexpr Storage kStorage = Storage::kQ8;
  static constexpr int kStepUnits = static_cast<int>(kQ8Group);
  static constexpr int kStepBytes = 2 * V::kWidth * (4 + kStepUnits);

  static Step begin(const std::byte* step) {
    const auto* scale = reinterpret_cast<const float*>(step);
    return {{V::load(scale), V::load(scale + V::kWidth)}};
  }
  static typename V::Reg load(const Step& loaded, const std::byte* step, int unit, int half) {
    const std::byte* values = step + 2 * V::kWidth * 4 + (2 * unit + half) * V::kWidth;
    return V::mul(V::from_i8(values), loaded.scale[half]);
  }
};

/// What to fetch into the second-level cache meanwhile: bytes from `from` on, `step` per step.
struct Ahead {
  const std::byte* from;
  std::int64_t step;
};

/// One block of kRows rows times kPanels neighbouring panels over `steps` steps of depth.
template <class V, class W, int kRows, int kPanels>
inline void tile(const typename W::Unit* a, const std::byte* weights, std::int64_t panel_bytes,
                 std::int64_t steps, float* out, std::int64_t out_panel, bool resume, Ahead ahead) {
  using Reg = typename V::Reg;
  constexpr int kCols = 2 * V::kWidth;
  Reg sum[kPanels][kRows][2];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float* from = out + p * out_panel + r * kCols;
      sum[p][r][0] = resume ? V::load(from) : V::zero();
      sum[p][r][1] = resume ? V::load(from + V::kWidth) : V::zero();
    }
  }
  for (std::int64_t step = 0; step < steps; ++step) {
    typename W::Step loaded[kPanels];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) loaded[p] = W::begin(weights + p * panel_bytes);
    // A step of q8 spans nine cache lines, of the others one or two.
    constexpr int kFetches = W::kStepUnits > 2 ? 8 : (W::kStepBytes + 63) / 64;
    if constexpr (W::kStepUnits <= 2) {
#pragma GCC unroll 2
      for (int i = 0; i < kFetches; ++i) V::prefetch(ahead.from + i * 64);
      ahead.from += ahead.step;
    }
#pragma GCC unroll 2
    for (int unit = 0; unit < W::kStepUnits; ++unit) {
      if constexpr (W::kStepUnits > 2) {
        if (unit % (W::kStepUnits / kFetches) == 0) {
          V::prefetch(ahead.from);
          ahead.from += ahead.step / kFetches;
        }
      }
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        const Reg b0 = W::load(loaded[p], weights + p * panel_bytes, unit, 0);
        const Reg b1 = W::load(loaded[p], weights + p * panel_bytes, unit, 1);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Reg x = W::broadcast(a + r);
          sum[p][r][0] = W::multiply_add(x, b0, sum[p][r][0]);
          sum[p][r][1] = W::multiply_add(x, b1, sum[p][r][1]);
        }
      }
      a += kRows;
    }
    weights += W::kStepBytes;
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* to = out + p * out_panel + r * kCols;
      V::store(to, sum[p][r][0]);
      V::store(to + V::kWidth, sum[p][r][1]);
    }
  }
}

template <class W>
using TileFunction = void (*)(const typename W::Unit*, const std::byte*, std::int64_t, std::int64_t,
                              float*, std::int64_t, bool, Ahead);

/// The tiles for 1 to V::kMaxRows rows: one panel at a time, and as many as V::panels(rows).
template <class V, class W>
struct Tiles {
  TileFunction<W> narrow[V::kMaxRows];
  TileFunction<W> wide[V::kMaxRows];
};

template <class V, class W, int... kRow>
constexpr Tiles<V, W> make_tiles(std::integer_sequence<int, kRow...>) {
  return {{tile<V, W, kRow + 1, 1>...}, {tile<V, W, kRow + 1, V::panels(kRow + 1)>...}};
}

template <class V, class W>
void product(const ProductArgs& args) {
  static constexpr Tiles<V, W> kTiles =
      make_tiles<V, W>(std::make_integer_sequence<int, V::kMaxRows>());
  constexpr std::int64_t kPieceSteps = V::kPieceBytes / W::kStepBytes;
  const auto* a = static_cast<const typename W::Unit*>(args.a);
  const std::int64_t units = args.depth / W::kUnitDepth;
  const std::int64_t steps = units / W::kStepUnits;
  const std::int64_t out_panel = args.blocks.places() * 2 * V::kWidth;
  const std::int64_t count = args.blocks.count();
  std::int64_t panel = 0;
  if (count == 1) {
    const int rows = static_cast<int>(args.blocks.rows());
    const int wide = V::panels(rows);
    for (; panel + wide <= args.panels; panel += wide) {
      const std::byte* weights = args.weights + panel * args.panel_bytes;
      kTiles.wide[rows - 1](a, weights, args.panel_bytes, steps, args.out + panel * out_panel,
                            out_panel, false, {weights + V::kAheadBytes, W::kStepBytes});
    }
  }
  // The next piece is fetched by the first few blocks, each a part of it.
  const std::int64_t piece = count == 1 ? steps : kPieceSteps;
  std::int64_t fetchers = 1;
  while (2 * fetchers <= count && fetchers < 8) fetchers *= 2;
  for (; panel < args.panels; ++panel) {
    const std::byte* weights = args.weights + panel * args.panel_bytes;
    float* out = args.out + panel * out_panel;
    for (std::int64_t first = 0; first < steps; first += piece) {
      const std::int64_t length = first + piece < steps ? piece : steps - first;
      const std::byte* here = weights + first * W::kStepBytes;
      const std::byte* next = count == 1 ? here + V::kAheadBytes : here + length * W::kStepBytes;
      for (std::int64_t b = 0; b < count; ++b) {
        const std::int64_t rows = args.blocks.size(b);
        const std::int64_t begin = args.blocks.begin(b);
        const Ahead ahead = b < fetchers ? Ahead{next + b * length * W::kStepBytes / fetchers,
                                                 W::kStepBytes / fetchers}
                                         : Ahead{here, 0};
        kTiles.narrow[rows - 1](a + begin * units + first * W::kStepUnits * rows, here, 0, length,
                                out + begin * 2 * V::kWidth, 0, first != 0, ahead);
      }
    }
  }
}

}  // namespace switchyard::cpu
