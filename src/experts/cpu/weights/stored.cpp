// Codes and scales into panels as they are, and back as numbers. Bound by the scattered writes of
// bytes into a panel that stays in the caches.
#include <algorithm>
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
  [[nodiscard]] const std::byte* scales(std::int64_t row) const {
    return rows.scales + row * layout.scale_row_bytes();
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
    if (!std::isfinite(StoredPanel::float_at(scale))) refuse("a scale", 0, k);
  }
}

/// A byte each; all bits of `mask` are what is not a number.
void put_byte_scales(const StoredPanel& panel, const StoredHalf& half, std::int64_t group,
                     std::byte mask, std::byte* out) {
  for (std::int64_t row = 0; row < half.layout.rows; ++row) {
    for (std::int64_t k = 0; k < half.layout.cols; k += group) {
      const std::byte scale = half.scales(row)[k / group];
      if ((scale & mask) == mask) refuse("a scale", row, k);
      out[panel.scale_place(k, half.first_col + row)] = scale;
    }
  }
}

void put_nvfp4_scales(const StoredPanel& panel, const StoredHalf& half, std::byte* out) {
  if (!std::isfinite(half.rows.factor)) refuse("the factor of the scales", 0, 0);
  std::memcpy(out + panel.factor_place(half.first_col), &half.rows.factor, sizeof(float));
  put_byte_scales(panel, half, kNvfp4Block, std::byte{0x7f}, out);
}

void put_int4_scales(const StoredPanel& panel, const StoredHalf& half, std::byte* out) {
  const Int4Form& form = half.layout.int4;
  const std::int64_t groups = half.layout.cols / form.group;
  for (std::int64_t row = 0; row < half.layout.rows; ++row) {
    const std::int64_t col = half.first_col + row;
    for (std::int64_t i = 0; i < groups; ++i) {
      const std::int64_t k = i * form.group;
      const Int4Scale scale = int4_scale(form, half.scales(row), groups, i);
      if (!std::isfinite(scale.scale)) refuse("a scale", row, k);
      std::memcpy(out + panel.scale_place(k, col), half.scales(row) + 2 * i, 2);
      if (!form.zero_points) continue;
      std::byte& both = out[panel.zero_place(k, col)];
      const auto zero = static_cast<std::byte>(scale.zero);
      both = half.first_col == 0 ? (both & std::byte{0xf0}) | zero
                                 : (both & std::byte{15}) | (zero << 4);
    }
  }
}

void put_scales(const StoredPanel& panel, const StoredHalf& half, std::byte* out) {
  switch (half.layout.format) {
    case WeightFormat::kE4M3: return put_e4m3_scales(panel, half, out);
    case WeightFormat::kInt4: return put_int4_scales(panel, half, out);
    case WeightFormat::kNvfp4: return put_nvfp4_scales(panel, half, out);
    default: return put_byte_scales(panel, half, kMxfp4Block, std::byte{0xff}, out);
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
void put_shared_codes(const StoredPanel& panel, const StoredHalf (&halves)[2], std::byte* out) {
  const std::int64_t depth = halves[0].layout.cols;
  const bool is_int4 = halves[0].layout.format == WeightFormat::kInt4;
  const auto nothing = static_cast<std::byte>(is_int4 ? kInt4Zero << 4 | kInt4Zero : 0);
  for (std::int64_t row = 0; row < halves[0].layout.rows; ++row) {
    const bool both = row < halves[1].layout.rows;
    for (std::int64_t k = 0; k < depth; k += 4) {  // a group is a multiple of 16
      std::byte* to = out + panel.place(k, row);
      for (std::int64_t pair = 0; pair < 2; ++pair) {
        const std::byte first = halves[0].values(row)[k / 2 + pair];
        const std::byte second = both ? halves[1].values(row)[k / 2 + pair] : nothing;
        to[8 * pair] = (first & std::byte{15}) | (second << 4);
        to[8 * pair + 1] = (first >> 4) | (second & std::byte{0xf0});
      }
    }
  }
}

/// Scales of 1 for codes that nobody has stored: they are of the usual size. So are codes of int4:
/// they mean 0.
void put_ones(const StoredPanel& panel, const PackStoredArgs& args) {
  const Kernels& kernels = *args.kernels;
  const std::int64_t cols = kernels.panel_cols;
  const bool is_int4 = kernels.storage == Storage::kInt4;
  constexpr int kInt4Zeros = kInt4Zero << 4 | kInt4Zero;
  std::memset(args.out, is_int4 ? kInt4Zeros : 0, static_cast<std::size_t>(args.shape.panel_bytes));
  const float one = 1.0F;
  const std::uint16_t short_one = kernels.int4.scale == DType::kF16 ? 0x3c00 : 0x3f80;
  const std::int64_t step =
      kernels.storage == Storage::kNvfp4 ? kNvfp4Block : std::int64_t{panel.group()};
  for (std::int64_t k = 0; k < args.shape.depth; k += step) {
    for (std::int64_t col = 0; col < cols; ++col) {
      std::byte* at = args.out + panel.scale_place(k, col);
      switch (kernels.storage) {
        case Storage::kE4M3: std::memcpy(at, &one, sizeof one); break;
        case Storage::kInt4: std::memcpy(at, &short_one, sizeof short_one); break;
        case Storage::kNvfp4:
          *at = std::byte{0x38};
          std::memcpy(args.out + panel.factor_place(col), &one, sizeof one);
          break;
        default: *at = std::byte{127};
      }
    }
  }
}

WeightFormat format_of(Storage storage) {
  switch (storage) {
    case Storage::kE4M3: return WeightFormat::kE4M3;
    case Storage::kInt4: return WeightFormat::kInt4;
    case Storage::kNvfp4: return WeightFormat::kNvfp4;
    default: return WeightFormat::kMxfp4;
  }
}

}  // namespace

void pack_stored(const PackStoredArgs& args) {
  const bool e4m3 = args.kernels->storage == Storage::kE4M3;
  const StoredPanel panel(*args.kernels);
  put_ones(panel, args);
  StoredHalf halves[2];
  for (int i = 0; i < 2; ++i) {
    halves[i] = {.rows = args.rows[i],
                 .layout = {.format = format_of(args.kernels->storage),
                            .rows = args.count[i],
                            .cols = args.depth,
                            .int4 = args.kernels->int4},
                 .first_col = i * args.kernels->panel_cols / 2};
    if (args.count[i] == 0) continue;
    put_scales(panel, halves[i], args.out);
    if (!e4m3) continue;
    check_e4m3_codes(halves[i]);
    put_e4m3_codes(panel, halves[i], args.out);
  }
  if (!e4m3) put_shared_codes(panel, halves, args.out);
}

void unpack_stored(const Kernels& kernels, const std::byte* panel, std::int64_t col,
                   std::int64_t depth, float* out) {
  const StoredPanel stored(kernels);
  for (std::int64_t k = 0; k < depth; ++k) out[k] = stored.value(panel, k, col);
}

}  // namespace switchyard::cpu
