// bf16 by tiles of 16 x 16: two blocks of 16 rows times one panel of 32 columns fill the eight tile
// registers (four sums, two of rows, two of weights). An odd last block goes alone. Rows are padded
// to 16, so one tile configuration serves all; places without a row give results nobody reads.
#include <algorithm>
#include <cstring>
#include <limits>

#include "experts/cpu/product/coded_tiles.hpp"

namespace switchyard::cpu {
namespace {

using amx::configure;
using amx::kPanelCols;
using amx::kRows;
using amx::kStepBytes;
using amx::kTileDepth;
using amx::kTileElements;
using amx::memory_barrier;

struct Here {};
using Pairs = Avx512Pairs<Here>;

/// Blocks of tiles: [depth/32][16][32] bf16.
struct TileRows {
  static std::int64_t block(const RowBlocks& blocks, std::int64_t b, std::int64_t depth) {
    return blocks.begin(b) * depth;
  }
  static void put(void* out, std::int64_t block, std::int64_t k, std::int64_t r, std::int64_t,
                  std::int64_t, float value) {
    static_cast<std::uint16_t*>(
        out)[block + k / kTileDepth * kTileElements + r * kTileDepth + k % kTileDepth] =
        Pairs::narrow(value);
  }
  /// `count` neighbours, which are bf16 already, from a multiple of 16 on.
  static void put_run(void* out, std::int64_t block, std::int64_t k, std::int64_t r,
                      const float* values, std::int64_t count) {
    constexpr int kWidth = Pairs::kWidth;
    std::int64_t done = 0;
    for (; done + kWidth <= count; done += kWidth) {
      const std::int64_t at = k + done;
      auto* const to = static_cast<std::uint16_t*>(out) + block + at / kTileDepth * kTileElements +
                       r * kTileDepth + at % kTileDepth;
      const __m512i bits = _mm512_castps_si512(Pairs::load(values + done));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
    for (; done < count; ++done) put(out, block, k + done, r, 0, 0, values[done]);
  }
};

using Type = RowType<Pairs, DType::kBF16>;

/// A line of each row in turn to each tile.
void pack_tiles(const PackRowsArgs& args) {
  constexpr std::int64_t kLine = kTileDepth * 2;
  auto* const out = static_cast<std::byte*>(args.out);
  for (std::int64_t r = 0; r < kRows; ++r) {
    const std::byte* const row = r < args.count ? args.rows[r] : nullptr;
    const std::byte* const next = r + 1 < args.count ? args.rows[r + 1] : nullptr;
    const std::int64_t bytes = row == nullptr ? 0 : args.cols * 2;
    std::byte* to = out + r * kLine;
    for (std::int64_t at = 0; at < args.depth * 2; at += kLine, to += kRows * kLine) {
      if (next != nullptr) __builtin_prefetch(next + at);
      if (at + kLine <= bytes) {
        _mm512_storeu_si512(to, _mm512_loadu_si512(row + at));
        continue;
      }
      const std::int64_t left = at < bytes ? bytes - at : 0;
      std::memset(to, 0, kLine);
      if (left > 0) std::memcpy(to, row + at, static_cast<std::size_t>(left));
    }
  }
}

/// Fetches the next panel into the second-level cache while this one is multiplied, as eight
/// streams side by side: memory gives 28 to 38 GB/s to eight and 22 to 25 to one (two cores of a
/// Xeon, prototype of 2026-11-21).
class Fetch {
 public:
  Fetch(const std::byte* panel, std::int64_t panel_bytes, std::int64_t lines_per_step)
      : from_(panel), part_(panel_bytes / kStreams), lines_(lines_per_step) {}
  void step() {
    for (std::int64_t i = 0; i < lines_; ++i) {
      _mm_prefetch(from_ + stream_ * part_, _MM_HINT_T1);
      if (++stream_ == kStreams) {
        stream_ = 0;
        from_ += 64;
      }
    }
  }

 private:
  static constexpr std::int64_t kStreams = 8;
  const std::byte* from_;
  std::int64_t part_;
  std::int64_t lines_;
  std::int64_t stream_ = 0;
};

/// kBlocks (1 or 2) blocks of 16 rows times one panel; `steps` tiles along the reduction.
template <int kBlocks>
inline void tile_product(const std::uint16_t* a, std::int64_t block_elements,
                         const std::uint16_t* weights, std::int64_t steps, float* out, bool resume,
                         Fetch& fetch) {
  constexpr int kOutStride = kPanelCols * 4;
  constexpr int kWeightStride = kPanelCols * 4;
  float* out1 = out + kRows * kPanelCols;
  const std::uint16_t* a1 = a + block_elements;
  memory_barrier();
  if (resume) {
    _tile_loadd(0, out, kOutStride);
    _tile_loadd(1, out + kRows, kOutStride);
    if constexpr (kBlocks == 2) {
      _tile_loadd(2, out1, kOutStride);
      _tile_loadd(3, out1 + kRows, kOutStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kBlocks == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (std::int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, weights, kWeightStride);
    _tile_loadd(4, a, 64);
    _tile_loadd(7, weights + kTileDepth, kWeightStride);
    fetch.step();
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBlocks == 2) {
      _tile_loadd(5, a1, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    a += kTileElements;
    a1 += kTileElements;
    weights += kTileDepth * kPanelCols;
  }
  _tile_stored(0, out, kOutStride);
  _tile_stored(1, out + kRows, kOutStride);
  if constexpr (kBlocks == 2) {
    _tile_stored(2, out1, kOutStride);
    _tile_stored(3, out1 + kRows, kOutStride);
  }
  memory_barrier();
}

/// Sums of `count` rows of a panel, [count, kPanelCols], to these rows, as To has them.
template <class To>
void write_rows(const OutputRows& to, std::int64_t panel, const float* sums, std::int64_t count) {
  const std::int64_t first = to.first_byte + panel * kPanelCols * size_of(to.dtype);
  for (std::int64_t r = 0; r < count; ++r, sums += kPanelCols) {
    if (to.rows[r] == nullptr) continue;
    std::byte* const row = to.rows[r] + first;
    const auto a = Pairs::load(sums);
    const auto b = Pairs::load(sums + Pairs::kWidth);
    if (to.past_caches) {
      To::stream(row, a, b);
    } else {
      To::write(row, a, b);
    }
  }
}

/// The product of some rows and panels, piece by piece of the depth.
class TilesProduct {
 public:
  explicit TilesProduct(const ProductArgs& args)
      : args_(args),
        count_(args.blocks.count()),
        pairs_((count_ + 1) / 2),
        block_elements_(kTileElements * args.steps) {}

  void run() {
    const std::int64_t row_bytes = count_ * kRows * args_.length() * kTileDepth * 2;
    const bool given = args_.next.from != nullptr;  // of a part of the depth
    if (!given && args_.panels > 1 && count_ > 2 && row_bytes > kCachedTileBytes) {
      by_pieces();
    } else {
      by_panels();
    }
  }

 private:
  static constexpr std::int64_t kPieceSteps = 8;  ///< 16 KiB of a panel, as much of 32 rows.
  /// Half of the second-level cache of what has tiles. Within it rows are not worth sums that wait
  /// in memory from piece to piece: 1.1 TFLOP/s beside 0.9 (1,024 deep), beyond it 0.5 beside 0.7
  /// (8,192 deep; 128 rows, weights from memory, one core of a Xeon, 2026-11-29).
  static constexpr std::int64_t kCachedTileBytes = std::int64_t{1} << 20;

  /// All rows pass by a piece of a panel.
  void by_panels() {
    const std::int64_t piece = count_ <= 2 ? args_.length() : kPieceSteps;
    // All lines of a panel, or of what else is next, over all steps that its rows take.
    const bool given = args_.next.from != nullptr;
    const std::int64_t step_bytes = given ? args_.next.bytes / args_.length() : kStepBytes;
    const std::int64_t lines = (step_bytes / 64 + pairs_ - 1) / pairs_;
    for (std::int64_t panel = 0; panel < args_.panels; ++panel) {
      const NextBytes next = given ? args_.next : NextBytes{panel_at(panel + 1), args_.panel_bytes};
      Fetch fetch(next.from, next.bytes, lines);
      for (std::int64_t first = 0; first < args_.length(); first += piece) {
        for (std::int64_t b = 0; b < count_; b += 2) {
          multiply(panel, first, std::min(piece, args_.length() - first), b, fetch);
        }
      }
    }
  }

  /// Two blocks of rows at a time pass by a piece of all panels: rows come from memory, or a cache
  /// that all cores share, once for all of these.
  void by_pieces() {
    for (std::int64_t first = 0; first < args_.length(); first += kPieceSteps) {
      const std::int64_t steps = std::min(kPieceSteps, args_.length() - first);
      const std::int64_t end = first + steps;
      // Behind the last piece the first of as many panels behind these.
      const bool more = end < args_.length();
      const std::int64_t ahead = more ? std::min(kPieceSteps, args_.length() - end) : kPieceSteps;
      const std::int64_t bytes = ahead * kStepBytes / pairs_;
      const std::int64_t lines = (bytes / 64 + steps - 1) / steps;
      for (std::int64_t b = 0; b < count_; b += 2) {
        for (std::int64_t panel = 0; panel < args_.panels; ++panel) {
          const std::byte* next =
              more ? panel_at(panel) + end * kStepBytes : panel_at(args_.panels + panel);
          Fetch fetch(next + b / 2 * bytes, bytes, lines);
          multiply(panel, first, steps, b, fetch);
        }
      }
    }
  }

  [[nodiscard]] const std::byte* panel_at(std::int64_t panel) const {
    return args_.weights + panel * args_.panel_bytes;
  }

  void multiply(std::int64_t panel, std::int64_t first, std::int64_t steps, std::int64_t b,
                Fetch& fetch) {
    const std::int64_t before = args_.first_step + first;
    const bool leaves = args_.to.rows != nullptr && first + steps == args_.length();
    const auto* weights =
        reinterpret_cast<const std::uint16_t*>(panel_at(panel) + first * kStepBytes);
    const std::uint16_t* rows =
        static_cast<const std::uint16_t*>(args_.a) + b * block_elements_ + before * kTileElements;
    float* sums = leaves && before == 0
                      ? leaving_
                      : args_.out + (panel * args_.blocks.places() + b * kRows) * kPanelCols;
    if (b + 1 < count_) {
      tile_product<2>(rows, block_elements_, weights, steps, sums, before != 0, fetch);
    } else {
      tile_product<1>(rows, 0, weights, steps, sums, before != 0, fetch);
    }
    if (!leaves) return;
    const std::int64_t begin = args_.blocks.begin(b);
    const std::int64_t rows_here = args_.blocks.begin(std::min(b + 2, count_)) - begin;
    const OutputRows to = args_.to.from_row(begin);
    if (to.dtype == DType::kF32) {
      write_rows<F32Weights<Pairs>>(to, panel, sums, rows_here);
    } else {
      write_rows<Bf16Weights<Pairs>>(to, panel, sums, rows_here);
    }
  }

  const ProductArgs& args_;
  std::int64_t count_;
  std::int64_t pairs_;
  std::int64_t block_elements_;
  /// Of rows that leave at once: stays in the first-level cache.
  alignas(64) float leaving_[2 * kRows * kPanelCols];
};

void tiles_product(const ProductArgs& args) {
  configure();
  TilesProduct(args).run();
  _tile_release();
}

void coded_tiles(Storage storage, const ProductArgs& args, const Int4Form& int4) {
  using Rounding = RoundingPairs<Pairs>;
  configure();
  Codes<Rounding>::with_reader(
      storage, int4, [&]<class Reader>() { amx::CodedTiles<Rounding, Reader>(args, int4).run(); });
  _tile_release();
}

float spin_tiles(std::int64_t rounds) {
  configure();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (std::int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 0;
}

constexpr Kernels kBF16 = {.isa = CpuIsa::kAmxBf16,
                           .dtype = DType::kBF16,
                           .storage = Storage::kBF16,
                           .panel_cols = kPanelCols,
                           .max_rows = kRows,
                           .fixed_blocks = true,
                           .depth_multiple = kTileDepth,
                           .element_bytes = 2,
                           .step_row_bytes = 2 * kTileDepth,
                           .pack_rows = pack_tiles,
                           .product = tiles_product,
                           .activate = activate<Pairs, Type, TileRows>,
                           .quantize_rows = nullptr,
                           .reduce = reduce<Pairs>,
                           .gradient = activation_gradient<Pairs>,
                           .spin = spin_tiles,
                           .spin_flops = 4.0 * 2 * kRows * kRows * kTileDepth,
                           .read = read_bytes<Pairs>,
                           .writes_rows = true};

}  // namespace

const Kernels* amx_bf16_kernels(DType dtype, bool q8) {
  return dtype == DType::kBF16 && !q8 ? &kBF16 : nullptr;
}

/// By how long it takes to make numbers of codes anew for every 32 rows, beside once for all rows
/// and keeping them (docs/history/cpu.md).
CodedRowsProduct amx_bf16_coded_rows(Storage storage) {
  const std::int64_t most_rows = storage == Storage::kMxfp4
                                     ? std::numeric_limits<std::int64_t>::max()
                                 : storage == Storage::kE4M3 ? 64
                                                             : 32;
  return {.most_rows = most_rows, .product = coded_tiles};
}

}  // namespace switchyard::cpu
