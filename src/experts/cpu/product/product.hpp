#pragma once

// Blocks of rows times column panels, for any vector type V and any form of weights W.
//
// Registers hold rows x (two vectors of) columns; each output is one chain in ascending depth from
// +0. With one block the weights are streamed once, several panels side by side where rows alone
// would not hide the latency of the fma. With more blocks the depth is cut so that the piece of the
// panel stays in the first-level cache while blocks pass over it; sums wait in `out` meanwhile,
// which changes no bit. Of many rows as many pass as the second-level cache keeps for the next
// panel. The next piece is fetched from memory meanwhile: without that, 32 rows per
// expert reached 0.79 of the peak on cold weights, with it 0.92 (one core, Zen 3, 2026-11-21).

#include <utility>

#include "experts/cpu/kernels/kernels.hpp"

namespace switchyard::cpu {

/// [depth][columns] float.
template <class V>
struct F32Weights {
  using Unit = float;  ///< One element of a packed row: what is broadcast.
  static constexpr Storage kStorage = Storage::kF32;
  static constexpr int kUnitDepth = 1;  ///< Values along the reduction in a Unit.
  static constexpr int kStepUnits = 1;  ///< Units in a step.
  static constexpr int kStepBytes = 2 * V::kWidth * 4;

  static typename V::Reg load(const std::byte* step, int, int half) {
    return V::load(reinterpret_cast<const float*>(step) + half * V::kWidth);
  }
  static typename V::Reg broadcast(const Unit* a) { return V::broadcast(a); }
  static typename V::Reg multiply_add(typename V::Reg a, typename V::Reg b, typename V::Reg c) {
    return V::fma(a, b, c);
  }
  /// The columns of a panel as the compute type.
  static void write(std::byte* to, typename V::Reg a, typename V::Reg b) {
    V::store(reinterpret_cast<float*>(to), a);
    V::store(reinterpret_cast<float*>(to) + V::kWidth, b);
  }
  static void stream(std::byte* to, typename V::Reg a, typename V::Reg b) {
    V::stream(reinterpret_cast<float*>(to), a);
    V::stream(reinterpret_cast<float*>(to) + V::kWidth, b);
  }
};

/// [depth/2][columns][2] bf16, widened exactly.
template <class V>
struct Bf16Weights : F32Weights<V> {
  static constexpr Storage kStorage = Storage::kBF16;
  static constexpr int kStepUnits = 2;
  static constexpr int kStepBytes = 2 * V::kWidth * 4;

  static typename V::Reg load(const std::byte* step, int unit, int half) {
    const std::byte* pairs = step + half * V::kWidth * 4;
    return unit == 0 ? V::first_bf16(pairs) : V::second_bf16(pairs);
  }
  static void write(std::byte* to, typename V::Reg a, typename V::Reg b) {
    V::store_words(to, V::bf16_words(a, b));
  }
  static void stream(std::byte* to, typename V::Reg a, typename V::Reg b) {
    V::stream_words(to, V::bf16_words(a, b));
  }
};

/// [depth][columns] f16, widened exactly.
template <class V>
struct F16Weights : F32Weights<V> {
  static constexpr Storage kStorage = Storage::kF16;
  static constexpr int kStepBytes = 2 * V::kWidth * 2;

  static typename V::Reg load(const std::byte* step, int, int half) {
    return V::from_f16(step + half * V::kWidth * 2);
  }
  static void write(std::byte* to, typename V::Reg a, typename V::Reg b) {
    V::store_words(to, V::f16_words(a, b));
  }
  static void stream(std::byte* to, typename V::Reg a, typename V::Reg b) {
    V::stream_words(to, V::f16_words(a, b));
  }
};

/// What to fetch into the second-level cache meanwhile: bytes from `from` on, `step` per step, and
/// where `step` is not 0 as many of the panels beside it.
struct Ahead {
  const std::byte* from;
  std::int64_t step;
};

/// One block of rows times neighbouring panels over some steps of depth.
struct TileArgs {
  const std::byte* a;
  const std::byte* weights;
  std::int64_t panel_bytes;
  std::int64_t steps;
  float* out;
  std::int64_t out_panel;  ///< Floats from one panel's sums to the next's.
  bool resume;             ///< Go on with the sums in `out`.
  Ahead ahead;
  OutputRows to{};            ///< Of this block.
  std::int64_t to_panel = 0;  ///< Which panel of them the first one here is.
};

/// Sums in registers by multiply-add.
template <class V, class W>
struct SumTile {
  static constexpr std::int64_t kStepBytes = W::kStepBytes;
  static constexpr std::int64_t kStepRowBytes = W::kStepUnits * sizeof(typename W::Unit);
  static constexpr std::int64_t kAheadBytes = V::kAheadBytes;  ///< With one block of rows.

  template <int kRows, int kPanels>
  static void run(const TileArgs& args) {
    using Reg = typename V::Reg;
    constexpr int kCols = 2 * V::kWidth;
    const auto* a = reinterpret_cast<const typename W::Unit*>(args.a);
    const std::byte* weights = args.weights;
    const std::byte* ahead = args.ahead.from;
    Reg sum[kPanels][kRows][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const float* from = args.out + p * args.out_panel + r * kCols;
        sum[p][r][0] = args.resume ? V::load(from) : V::zero();
        sum[p][r][1] = args.resume ? V::load(from + V::kWidth) : V::zero();
      }
    }
    const std::int64_t panel_bytes = args.panel_bytes;
    const std::int64_t ahead_step = args.ahead.step;
    for (std::int64_t step = args.steps; step > 0; --step) {
#pragma GCC unroll 2
      for (int line = 0; line < (W::kStepBytes + 63) / 64; ++line) V::prefetch(ahead + line * 64);
      if (kPanels > 1 && ahead_step != 0) {
#pragma GCC unroll 8
        for (int p = 1; p < kPanels; ++p) {
#pragma GCC unroll 2
          for (int line = 0; line < (W::kStepBytes + 63) / 64; ++line) {
            V::prefetch(ahead + p * panel_bytes + line * 64);
          }
        }
      }
      ahead += ahead_step;
#pragma GCC unroll 2
      for (int unit = 0; unit < W::kStepUnits; ++unit) {
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
          const Reg b0 = W::load(weights + p * panel_bytes, unit, 0);
          const Reg b1 = W::load(weights + p * panel_bytes, unit, 1);
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
    if (args.to.rows == nullptr) {
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          float* to = args.out + p * args.out_panel + r * kCols;
          V::store(to, sum[p][r][0]);
          V::store(to + V::kWidth, sum[p][r][1]);
        }
      }
    } else if (args.to.dtype == DType::kF32) {
      write_rows<kRows, kPanels, F32Weights<V>>(args, 4 * kCols, sum);
    } else {
      write_rows<kRows, kPanels, W>(args, size_of(args.to.dtype) * kCols, sum);
    }
  }

 private:
  /// As W has it, rounded or not.
  template <int kRows, int kPanels, class To>
  [[gnu::always_inline]] static void write_rows(const TileArgs& args, std::int64_t panel_bytes,
                                                const typename V::Reg (&sum)[kPanels][kRows][2]) {
    const std::int64_t first = args.to.first_byte + args.to_panel * panel_bytes;
    const bool past_caches = args.to.past_caches;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      std::byte* const row = args.to.rows[r];
      if (row == nullptr) continue;
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        std::byte* const to = row + first + p * panel_bytes;
        if (past_caches) {
          To::stream(to, sum[p][r][0], sum[p][r][1]);
        } else {
          To::write(to, sum[p][r][0], sum[p][r][1]);
        }
      }
    }
  }
};

using TileFunction = void (*)(const TileArgs&);

/// The tiles for 1 to V::kMaxRows rows: one panel at a time, and as many as V::panels(rows).
template <class V>
struct Tiles {
  TileFunction narrow[V::kMaxRows];
  TileFunction wide[V::kMaxRows];
};

template <class V, class Tile, int... kRow>
constexpr Tiles<V> make_tiles(std::integer_sequence<int, kRow...>) {
  return {{Tile::template run<kRow + 1, 1>...},
          {Tile::template run<kRow + 1, V::panels(kRow + 1)>...}};
}

/// One block: as many panels at a time as keep the registers busy. The last steps of some panels
/// fetch the beginning of the next ones: panels may be short, and a stream that nobody has
/// announced begins with waiting.
template <class V, class Tile>
void product_of_few(const ProductArgs& args, const Tiles<V>& tiles) {
  constexpr std::int64_t kLastSteps = (Tile::kAheadBytes + Tile::kStepBytes - 1) / Tile::kStepBytes;
  const auto rows = static_cast<int>(args.blocks.rows());
  const std::int64_t out_panel = args.blocks.places() * 2 * V::kWidth;
  std::int64_t panels = V::panels(rows);
  for (std::int64_t panel = 0; panel < args.panels; panel += panels) {
    if (panel + panels > args.panels) panels = 1;
    const std::byte* weights = args.weights + panel * args.panel_bytes;
    const std::byte* next = weights + panels * args.panel_bytes;
    const TileFunction tile = panels == 1 ? tiles.narrow[rows - 1] : tiles.wide[rows - 1];
    const bool fetches = rows >= V::ahead_rows();
    const std::int64_t length = args.length();
    const bool has_next = fetches && kLastSteps > 0 && args.part_steps == 0 &&
                          length > kLastSteps && panel + panels < args.panels;
    const std::int64_t steps = has_next ? length - kLastSteps : length;
    TileArgs tile_args{
        .a = static_cast<const std::byte*>(args.a) + args.first_step * rows * Tile::kStepRowBytes,
        .weights = weights,
        .panel_bytes = args.panel_bytes,
        .steps = steps,
        .out = args.out + panel * out_panel,
        .out_panel = out_panel,
        .resume = args.first_step != 0,
        .ahead = fetches && args.part_steps == 0
                     ? Ahead{weights + Tile::kAheadBytes, Tile::kStepBytes}
                     : Ahead{weights, 0},
        .to = has_next ? OutputRows{} : args.to,
        .to_panel = panel};
    tile(tile_args);
    if (!has_next) continue;
    tile_args.to = args.to;
    tile_args.a += steps * rows * Tile::kStepRowBytes;
    tile_args.weights += steps * Tile::kStepBytes;
    tile_args.steps = kLastSteps;
    tile_args.resume = true;
    tile_args.ahead.from = next;
    tile(tile_args);
  }
}

/// Of packed rows, what stays in the second-level cache beside a piece of a panel and sums.
inline constexpr std::int64_t kCachedRowBytes = 192 << 10;

/// Blocks [begin, end) times a piece of a panel, `steps` from `first` on.
struct PieceArgs {
  std::int64_t begin, end;
  std::int64_t panel;
  std::int64_t first, steps;
  NextBytes next;  ///< The first few blocks, a power of two, each fetch a part of it.
};

template <class V, class Tile>
void product_of_piece(const ProductArgs& args, const Tiles<V>& tiles, const PieceArgs& piece) {
  const std::int64_t count = piece.end - piece.begin;
  std::int64_t fetchers = 1;
  while (2 * fetchers <= count && fetchers < 8) fetchers *= 2;
  float* const out = args.out + piece.panel * args.blocks.places() * 2 * V::kWidth;
  const std::byte* const weights =
      args.weights + piece.panel * args.panel_bytes + piece.first * Tile::kStepBytes;
  const std::int64_t before = args.first_step + piece.first;
  const bool last = piece.first + piece.steps == args.length();
  for (std::int64_t b = 0; b < count; ++b) {
    const std::int64_t begin = args.blocks.begin(piece.begin + b);
    const std::int64_t rows = args.blocks.size(piece.begin + b);
    tiles.narrow[rows - 1](
        {.a = static_cast<const std::byte*>(args.a) +
              (begin * args.steps + before * rows) * Tile::kStepRowBytes,
         .weights = weights,
         .panel_bytes = 0,
         .steps = piece.steps,
         .out = out + begin * 2 * V::kWidth,
         .out_panel = 0,
         .resume = before != 0,
         .ahead = b < fetchers ? Ahead{piece.next.from + b * (piece.next.bytes / fetchers),
                                       piece.next.bytes / piece.steps / fetchers}
                               : Ahead{weights, 0},
         .to = last ? args.to.from_row(begin) : OutputRows{},
         .to_panel = piece.panel});
  }
}

/// More blocks. Panel by panel where all rows stay in the second-level cache, or where there is one
/// panel; else as many rows as stay there, and for each piece of the depth all panels.
template <class V, class Tile>
void product_of_many(const ProductArgs& args, const Tiles<V>& tiles) {
  constexpr std::int64_t kPieceSteps = V::kPieceBytes / Tile::kStepBytes;
  const std::int64_t count = args.blocks.count();
  const std::int64_t length = args.length();
  const auto steps_from = [&](std::int64_t first) {
    return length - first < kPieceSteps ? length - first : kPieceSteps;
  };
  const auto run = [&](std::int64_t begin, std::int64_t end, std::int64_t panel, std::int64_t first,
                       const std::byte* next) {
    const std::int64_t steps = steps_from(first);
    const bool given = args.next.from != nullptr;
    product_of_piece<V, Tile>(
        args, tiles,
        {.begin = begin,
         .end = end,
         .panel = panel,
         .first = first,
         .steps = steps,
         .next = given ? args.next : NextBytes{next, steps * Tile::kStepBytes}});
  };
  if (args.panels == 1 || args.blocks.rows() * length * Tile::kStepRowBytes <= kCachedRowBytes) {
    for (std::int64_t panel = 0; panel < args.panels; ++panel) {
      for (std::int64_t first = 0; first < length; first += kPieceSteps) {
        const std::byte* here = args.weights + panel * args.panel_bytes + first * Tile::kStepBytes;
        run(0, count, panel, first, here + steps_from(first) * Tile::kStepBytes);
      }
    }
    return;
  }
  const std::int64_t block_bytes = V::kMaxRows * steps_from(0) * Tile::kStepRowBytes;
  const std::int64_t most = kCachedRowBytes / block_bytes;
  const std::int64_t parts = most < 1 ? count : (count + most - 1) / most;
  for (std::int64_t part = 0; part < parts; ++part) {
    for (std::int64_t first = 0; first < length; first += kPieceSteps) {
      for (std::int64_t panel = 0; panel < args.panels; ++panel) {
        // Behind the last panel the first one's next piece.
        const bool more = panel + 1 < args.panels;
        const std::int64_t next_step = more ? first : first + steps_from(first);
        const std::byte* next =
            args.weights + (more ? panel + 1 : 0) * args.panel_bytes + next_step * Tile::kStepBytes;
        run(part * count / parts, (part + 1) * count / parts, panel, first, next);
      }
    }
  }
}

template <class V, class Tile>
void product(const ProductArgs& args) {
  static constexpr Tiles<V> kTiles =
      make_tiles<V, Tile>(std::make_integer_sequence<int, V::kMaxRows>());
  if (args.blocks.count() == 1) {
    product_of_few<V, Tile>(args, kTiles);
  } else {
    product_of_many<V, Tile>(args, kTiles);
  }
}

}  // namespace switchyard::cpu
