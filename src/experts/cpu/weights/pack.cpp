// Weights into panels, at load. Bound by memory: each panel is read row by row in pieces that stay
// in the first-level cache, and written once, past the caches: what a store would first fetch would
// be a third of the traffic.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "core/half.hpp"
#include "experts/cpu/weights/transpose.hpp"
#include "experts/cpu/weights/weights.hpp"

namespace switchyard::cpu {
namespace {

/// The rows of one half of a panel.
struct Half {
  const std::byte* rows;
  std::int64_t count;      ///< Rows that there are, of half the panel's columns.
  std::int64_t first_col;  ///< In the panel.
};

/// Units of depth [first, last) of a panel, before they leave for memory.
struct Piece {
  std::byte* data;
  std::int64_t first, last;
};

constexpr std::int64_t kMaxPanelCols = 64;

/// Columns [col, last_col) of a half, one value after the other; what is missing becomes 0.
template <class T, int kGroup>
void pack_rest(const PackPanelArgs& args, const Half& half, std::int64_t col, std::int64_t last_col,
               const Piece& piece) {
  T* out = reinterpret_cast<T*>(piece.data);
  const std::int64_t cols = args.kernels->panel_cols;
  for (; col < last_col; ++col) {
    const T* row = reinterpret_cast<const T*>(half.rows) + col * args.depth;
    const std::int64_t used = col < half.count ? args.depth : 0;
    for (std::int64_t k = piece.first * kGroup; k < piece.last * kGroup; ++k) {
      out[((k / kGroup - piece.first) * cols + half.first_col + col) * kGroup + k % kGroup] =
          k < used ? row[k] : T{0};
    }
  }
}

/// [depth / kGroup][columns][kGroup]: kGroup 1 for f32 and f16, 2 for bf16; a Unit is a group.
template <class T, int kGroup, class Unit>
void pack_plain(const PackPanelArgs& args) {
  static_assert(sizeof(Unit) == kGroup * sizeof(T));
  constexpr std::int64_t kUnits = Vector16<Unit>::kUnits;
  constexpr std::int64_t kPiece = 64 / sizeof(Unit);  // a cache line of every row, then the next
  const std::int64_t cols = args.kernels->panel_cols;
  const std::int64_t half_cols = cols / 2;
  const std::int64_t units = args.shape.depth / kGroup;
  const std::int64_t whole = args.depth / kGroup / kPiece * kPiece;
  const std::int64_t row_bytes = args.depth * std::int64_t{sizeof(T)};
  const Half halves[] = {
      {static_cast<const std::byte*>(args.rows[0]), args.count[0], 0},
      {static_cast<const std::byte*>(args.rows[1]), args.count[1], half_cols},
  };
  const std::int64_t unit_bytes = cols * std::int64_t{sizeof(Unit)};
  require(cols <= kMaxPanelCols, "panels of {} columns, want at most {}", cols, kMaxPanelCols);
  alignas(64) std::byte packed[kPiece * kMaxPanelCols * std::int64_t{sizeof(Unit)}];
  for (std::int64_t first = 0; first < units; first += kPiece) {
    const Piece piece{packed, first, std::min(first + kPiece, units)};
    for (const Half& half : halves) {
      const std::int64_t squares = first < whole ? half.count / kUnits * kUnits : 0;
      for (std::int64_t col = 0; col < squares; col += kUnits) {
        const TransposeArgs square{
            .rows = half.rows + col * row_bytes + first * std::int64_t{sizeof(Unit)},
            .row_bytes = row_bytes,
            .out = packed + (half.first_col + col) * std::int64_t{sizeof(Unit)},
            .out_bytes = unit_bytes};
        for (std::int64_t k = 0; k < kPiece; k += kUnits) transpose_square<Unit>(square, k);
      }
      pack_rest<T, kGroup>(args, half, squares, half_cols, piece);
    }
    stream_bytes(packed, (piece.last - first) * unit_bytes, args.out + first * unit_bytes);
  }
  stream_fence();
}

/// Row of the panel's column `col`, or null if there is none.
template <class T>
const T* row_of(const PackPanelArgs& args, std::int64_t col) {
  const std::int64_t half_cols = args.kernels->panel_cols / 2;
  const std::int64_t half = col / half_cols;
  const std::int64_t index = col % half_cols;
  if (index >= args.count[half]) return nullptr;
  return static_cast<const T*>(args.rows[half]) + index * args.depth;
}

/// Largest magnitude / 127 as bf16, rounded up, so that the values keep within +-127. Not a number
/// if a value is not finite: nothing is hidden.
std::uint16_t q8_scale(const float* values, std::int64_t count) {
  float largest = 0;
  float poison = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    largest = std::max(largest, std::fabs(values[k]));
    poison += values[k] * 0.0F;
  }
  if (poison != 0) return 0x7fc0;
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(largest / 127.0F) + 0xffffU) >>
                                    16);
}

/// [depth / 32]{[columns / 2][2] bf16 scales, [16][columns][2] int8}, the scales of the two halves
/// of the columns in pairs.
void pack_q8(const PackPanelArgs& args) {
  const std::int64_t cols = args.kernels->panel_cols;
  const std::int64_t half_cols = cols / 2;
  std::byte* out = args.out;
  for (std::int64_t first = 0; first < args.shape.depth; first += kQ8Group) {
    auto* scales = reinterpret_cast<std::uint16_t*>(out);
    auto* values = reinterpret_cast<std::int8_t*>(scales + cols);
    const std::int64_t length = std::clamp<std::int64_t>(args.depth - first, 0, kQ8Group);
    std::memset(out, 0, static_cast<std::size_t>(cols * kQ8GroupBytes));
    for (std::int64_t col = 0; col < cols; ++col) {
      const auto* row = row_of<float>(args, col);
      if (row == nullptr) continue;
      const std::uint16_t bits = q8_scale(row + first, length);
      scales[col % half_cols * 2 + col / half_cols] = bits;
      const float scale = bf16_to_float(bits);
      if (scale == 0 || std::isnan(scale)) continue;
      for (std::int64_t k = 0; k < length; ++k) {
        const float scaled = std::nearbyint(row[first + k] / scale);
        values[2 * (k / 2 * cols + col) + k % 2] =
            static_cast<std::int8_t>(std::clamp(scaled, -127.0F, 127.0F));
      }
    }
    out += cols * kQ8GroupBytes;
  }
}

}  // namespace

void pack_panel(const PackPanelArgs& args) {
  switch (args.kernels->storage) {
    case Storage::kF32: return pack_plain<float, 1, std::uint32_t>(args);
    case Storage::kBF16: return pack_plain<std::uint16_t, 2, std::uint32_t>(args);
    case Storage::kF16: return pack_plain<std::uint16_t, 1, std::uint16_t>(args);
    case Storage::kQ8: return pack_q8(args);
    case Storage::kE4M3:
    case Storage::kMxfp4:
    case Storage::kInt4:
    case Storage::kNvfp4: break;  // pack_stored()
  }
}

}  // namespace switchyard::cpu
