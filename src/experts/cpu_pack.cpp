// Weights into panels, at load. Bound by memory: each panel is read row by row in pieces that stay
// in the first-level cache and written once.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "experts/cpu_weights.hpp"

namespace switchyard::cpu {
namespace {

/// Row of the panel's column `col`, or null if there is none.
template <class T>
const T* row_of(const PackPanelArgs& args, std::int64_t col) {
  const std::int64_t half_cols = args.kernels->panel_cols / 2;
  const std::int64_t half = col / half_cols;
  const std::int64_t index = col % half_cols;
  if (index >= args.count[half]) return nullptr;
  return static_cast<const T*>(args.rows[half]) + index * args.depth;
}

/// [depth / kGroup][columns][kGroup]: kGroup 1 for f32 and f16, 2 for bf16.
template <class T, int kGroup>
void pack_plain(const PackPanelArgs& args) {
  constexpr std::int64_t kPiece = 64;  // values of every column before moving on
  T* out = reinterpret_cast<T*>(args.out);
  const std::int64_t cols = args.kernels->panel_cols;
  for (std::int64_t first = 0; first < args.shape.depth; first += kPiece) {
    const std::int64_t last = std::min(first + kPiece, args.shape.depth);
    for (std::int64_t col = 0; col < cols; ++col) {
      const T* row = row_of<T>(args, col);
      const std::int64_t used = row == nullptr ? first : std::clamp(args.depth, first, last);
      for (std::int64_t k = first; k < last; ++k) {
        out[(k / kGroup * cols + col) * kGroup + k % kGroup] = k < used ? row[k] : T{0};
      }
    }
  }
}

/// [depth / 32]{[columns] float scales, [16][columns][2] int8}; scale = largest magnitude / 127.
void pack_q8(const PackPanelArgs& args) {
  const std::int64_t cols = args.kernels->panel_cols;
  std::byte* out = args.out;
  for (std::int64_t first = 0; first < args.shape.depth; first += kQ8Group) {
    auto* scales = reinterpret_cast<float*>(out);
    auto* values = reinterpret_cast<std::int8_t*>(scales + cols);
    const std::int64_t length = std::clamp<std::int64_t>(args.depth - first, 0, kQ8Group);
    std::memset(out, 0, static_cast<std::size_t>(cols * (4 + kQ8Group)));
    for (std::int64_t col = 0; col < cols; ++col) {
      const float* row = row_of<float>(args, col);
      if (row == nullptr) continue;
      float largest = 0;
      for (std::int64_t k = 0; k < length; ++k) {
        largest = std::max(largest, std::fabs(row[first + k]));
      }
      scales[col] = largest / 127.0F;
      if (scales[col] == 0) continue;
      for (std::int64_t k = 0; k < length; ++k) {
        const float scaled = std::nearbyint(row[first + k] / scales[col]);
        values[2 * (k / 2 * cols + col) + k % 2] =
            static_cast<std::int8_t>(std::clamp(scaled, -127.0F, 127.0F));
      }
    }
    out += cols * (4 + kQ8Group);
  }
}

}  // namespace

void pack_panel(const PackPanelArgs& args) {
  switch (args.kernels->storage) {
    case Storage::kF32: return pack_plain<float, 1>(args);
    case Storage::kBF16: return pack_plain<std::uint16_t, 2>(args);
    case Storage::kF16: return pack_plain<std::uint16_t, 1>(args);
    case Storage::kQ8: return pack_q8(args);
  }
}

}  // namespace switchyard::cpu
