// Codes and scales into panels as they are, and back as numbers. Bound by the scattered writes of
// bytes into a panel that stays in the caches.
#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "experts/cpu/kernels/stored_panel.hpp"
#include "experts/cpu/weights/weights.hpp"

namespace switchyard::cpu {
namespace {

/// The rows of half a panel.
struct StoredHalf {
  ConstStoredRows rows;
  StoredLayout layout;
  std::int64_t first_col;

  [[nodiscard]] const std::byte* values(std::int64_t row) const {
    return rows.values + row * layout.value_row_bytes();
  }
};

[[noreturn]] void refuse(const char* what, std::int64_t row, std::int64_t k) {
  fail(ErrorCode::kInvalidArgument, "{} of stored weights is not a number: row {}, column {}", what,
       row, k);
}

void put_e4m3_scales(const StoredPanel& panel, const StoredHalf& half, std::byte* out) {
  for (std::int64_t k = 0; k < half.layout.cols; k += kE4M3Block) {
    const std::byte* scale =
        half.rows.scales + k / kE4M3Block * static_cast<std::int64_t>(sizeof(float));
    std::memcpy(out + panel.scale_place(k, half.first_col), scale, sizeof(float));
    if (!std::isfinite(panel.scale(out, k, half.first_col))) refuse("a scale", 0, k);
  }
}

void put_mxfp4_scales(const StoredPanel& panel, const StoredHalf& half, std::byte* out) {
  for (std::int64_t row = 0; row < half.layout.rows; ++row) {
    const std::byte* scales = half.rows.scales + row * half.layout.scale_row_bytes();
    for (std::int64_t k = 0; k < half.layout.cols; k += kMxfp4Block) {
      const std::byte scale = scales[k / kMxfp4Block];
      if (scale == std::byte{0xff}) refuse("a scale", row, k);
      out[panel.scale_place(k, half.first_col + row)] = scale;
    }
  }
}

void check_e4m3_codes(const StoredHalf& half) {
  for (std::int64_t row = 0; row < half.layout.rows; ++row) {
    const std::byte* values = half.values(row);
    const auto is_nan = [](std::byte code) { return (code & std::byte{0x7f}) == std::byte{0x7f}; };
    const std::byte* const end = values + half.layout.cols;
    const std::byte* const found = std::find_if(values, end, is_nan);
    if (found != end) refuse("a code", row, found - values);
  }
}

/// Codes of four depths at a time, two of a column side by side.
void put_e4m3_codes(const StoredPanel& panel, const StoredHalf& half, std::byte* out) {
  const std::int64_t whole = half.layout.cols / 4 * 4;
  for (std::int64_t k = 0; k < whole; k += 4) {
    for (std::int64_t row = 0; row < half.layout.rows; ++row) {
      std::byte* to = out + panel.place(k, half.first_col + row);
      const std::byte* from = half.values(row) + k;
      std::memcpy(to, from, 2);
      std::memcpy(to + 8, from + 2, 2);
    }
  }
  for (std::int64_t k = whole; k < half.layout.cols; ++k) {
    for (std::int64_t row = 0; row < half.layout.rows; ++row) {
      out[panel.place(k, half.first_col + row)] = half.values(row)[k];
    }
  }
}

/// Both halves at once: they share bytes.
void put_mxfp4_codes(const StoredPanel& panel, const StoredHalf (&halves)[2], std::byte* out) {
  const std::int64_t depth = halves[0].layout.cols;
  for (std::int64_t row = 0; row < halves[0].layout.rows; ++row) {
    const bool both = row < halves[1].layout.rows;
    for (std::int64_t k = 0; k < depth; k += 4) {
      std::byte* to = out + panel.place(k, row);
      for (std::int64_t pair = 0; pair < 2; ++pair) {
        const std::byte first = halves[0].values(row)[k / 2 + pair];
        const std::byte second = both ? halves[1].values(row)[k / 2 + pair] : std::byte{0};
        to[8 * pair] = (first & std::byte{15}) | (second << 4);
        to[8 * pair + 1] = (first >> 4) | (second & std::byte{0xf0});
      }
    }
  }
}

/// Scales of 1 for codes that nobody has stored: they are of the usual size.
void put_scales_of_one(const StoredPanel& panel, bool e4m3, std::int64_t bytes, std::int64_t cols,
                       std::int64_t depth, std::byte* out) {
  std::memset(out, 0, static_cast<std::size_t>(bytes));
  const float one = 1.0F;
  for (std::int64_t k = 0; k < depth; k += e4m3 ? kE4M3Block : kMxfp4Block) {
    for (std::int64_t col = 0; col < cols; col += e4m3 ? cols / 2 : 1) {
      std::byte* at = out + panel.scale_place(k, col);
      if (e4m3) {
        std::memcpy(at, &one, sizeof one);
      } else {
        *at = std::byte{127};
      }
    }
  }
}

}  // namespace

void pack_stored(const PackStoredArgs& args) {
  const bool e4m3 = args.kernels->storage == Storage::kE4M3;
  const StoredPanel panel(args.kernels->storage, args.kernels->panel_cols);
  const std::int64_t cols = args.kernels->panel_cols;
  put_scales_of_one(panel, e4m3, args.shape.panel_bytes, cols, args.shape.depth, args.out);
  StoredHalf halves[2];
  for (int i = 0; i < 2; ++i) {
    halves[i] = {.rows = args.rows[i],
                 .layout = {.format = e4m3 ? WeightFormat::kE4M3 : WeightFormat::kMxfp4,
                            .rows = args.count[i],
                            .cols = args.depth},
                 .first_col = i * cols / 2};
    if (args.count[i] == 0) continue;
    if (e4m3) {
      put_e4m3_scales(panel, halves[i], args.out);
      check_e4m3_codes(halves[i]);
      put_e4m3_codes(panel, halves[i], args.out);
    } else {
      put_mxfp4_scales(panel, halves[i], args.out);
    }
  }
  if (!e4m3) put_mxfp4_codes(panel, halves, args.out);
}

void unpack_stored(const Kernels& kernels, const std::byte* panel, std::int64_t col,
                   std::int64_t depth, float* out) {
  const StoredPanel stored(kernels.storage, kernels.panel_cols);
  for (std::int64_t k = 0; k < depth; ++k) out[k] = stored.value(panel, k, col);
}

}  // namespace switchyard::cpu
