// bf16 by tiles of 16 x 16: two blocks of 16 rows times one panel of 32 columns fill the eight tile
// registers (four sums, two of rows, two of weights). An odd last block goes alone. Rows are padded
// to 16, so one tile configuration serves all; places without a row give results nobody reads.
#include <cstring>

#include "experts/cpu/product/pair_rows.hpp"

namespace switchyard::cpu {
namespace {

struct Here {};
using Pairs = Avx512Pairs<Here>;
constexpr std::int64_t kRows = 16;       // of a tile
constexpr std::int64_t kTileDepth = 32;  // values along the reduction in a tile
constexpr std::int64_t kPanelCols = 32;
constexpr std::int64_t kTileElements = kRows * kTileDepth;

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
};

using Type = RowType<Pairs, DType::kBF16>;

void pack_tiles(const PackRowsArgs& args) {
  if (args.count < kRows) {
    std::memset(args.out, 0, static_cast<std::size_t>(kRows * args.depth) * 2);
  }
  pack_rows<Pairs, Type, TileRows>(args);
}

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// gcc 12 declares neither that ldtilecfg reads 64 bytes nor that tile loads and stores touch
/// memory: so the configuration is an operand, and this stands around every use of tiles.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

inline void configure() {
  const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));
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

void tiles_product(const ProductArgs& args) {
  constexpr std::int64_t kPieceSteps = 16;  // 32 KiB of a panel
  const auto* a = static_cast<const std::uint16_t*>(args.a);
  const std::int64_t steps = args.steps;
  const std::int64_t block_elements = kTileElements * steps;
  const std::int64_t count = args.blocks.count();
  const std::int64_t piece = count <= 2 ? args.length() : kPieceSteps;
  // All lines of a panel, or of what else is next, over all steps that its rows take.
  const std::int64_t pairs = (count + 1) / 2;
  const std::int64_t step_bytes =
      args.next.from != nullptr ? args.next.bytes / args.length() : kTileDepth * kPanelCols * 2;
  const std::int64_t lines = (step_bytes / 64 + pairs - 1) / pairs;
  configure();
  for (std::int64_t panel = 0; panel < args.panels; ++panel) {
    const NextBytes next =
        args.next.from != nullptr
            ? args.next
            : NextBytes{args.weights + (panel + 1) * args.panel_bytes, args.panel_bytes};
    Fetch fetch(next.from, next.bytes, lines);
    const auto* weights =
        reinterpret_cast<const std::uint16_t*>(args.weights + panel * args.panel_bytes);
    float* out = args.out + panel * args.blocks.places() * kPanelCols;
    for (std::int64_t first = 0; first < args.length(); first += piece) {
      const std::int64_t length = first + piece < args.length() ? piece : args.length() - first;
      const std::int64_t before = args.first_step + first;
      const std::uint16_t* w = weights + first * kTileDepth * kPanelCols;
      for (std::int64_t b = 0; b < count; b += 2) {
        const std::uint16_t* rows = a + b * block_elements + before * kTileElements;
        float* sums = out + b * kRows * kPanelCols;
        if (b + 1 < count) {
          tile_product<2>(rows, block_elements, w, length, sums, before != 0, fetch);
        } else {
          tile_product<1>(rows, 0, w, length, sums, before != 0, fetch);
        }
      }
    }
  }
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
                           .read = read_bytes<Pairs>};

}  // namespace

const Kernels* amx_bf16_kernels(DType dtype, bool q8) {
  return dtype == DType::kBF16 && !q8 ? &kBF16 : nullptr;
}

}  // namespace switchyard::cpu
