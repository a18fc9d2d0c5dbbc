// The formats of expert weights: their sizes in memory, and what their codes mean.
#include "switchyard/weight_format.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.hpp"
#include "core/formats/int4.hpp"
#include "core/fp8.hpp"
#include "core/half.hpp"
#include "core/mxfp4.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

/// Values of a row that share a scale.
std::int64_t group_of(const StoredLayout& layout) {
  switch (layout.format) {
    case WeightFormat::kMxfp4: return kMxfp4Block;
    case WeightFormat::kNvfp4: return kNvfp4Block;
    default: return layout.int4.group;
  }
}

constexpr std::int64_t blocks_of(std::int64_t extent) {
  return (extent + kE4M3Block - 1) / kE4M3Block;
}

constexpr std::array<float, 256> make_e4m3_table() {
  std::array<float, 256> table{};
  for (std::size_t i = 0; i < 256; ++i) table[i] = e4m3_to_float(static_cast<std::uint8_t>(i));
  return table;
}
constexpr std::array<float, 256> kE4M3 = make_e4m3_table();

[[noreturn]] void refuse(WeightFormat format) {
  if (format == WeightFormat::kStored) {
    fail(ErrorCode::kUnsupported, "stored is not a format: want the one that the weights have");
  }
  fail(ErrorCode::kUnsupported, "q8 is made when weights are packed: nothing stores it");
}

/// One row; `scales` are the f32 factors of its blocks, at any address.
void decode_e4m3(const std::byte* values, const std::byte* scales, std::int64_t cols, DType dtype,
                 void* out) {
  for (std::int64_t begin = 0; begin < cols; begin += kE4M3Block) {
    float scale = 0;
    std::memcpy(&scale, scales + begin / kE4M3Block * std::int64_t{sizeof scale}, sizeof scale);
    const std::int64_t end = std::min(begin + kE4M3Block, cols);
    for (std::int64_t col = begin; col < end; ++col) {
      store_float(out, dtype, col, kE4M3[std::to_integer<std::size_t>(values[col])] * scale);
    }
  }
}

/// `count` values, two a byte, from a table of the 16 that a code may mean: each is rounded once,
/// not per use.
template <typename T>
void decode_nibbles(const std::byte* values, std::int64_t count,
                    const std::array<float, 16>& meaning, DType dtype, std::byte* out) {
  std::array<T, 16> table{};
  for (std::size_t i = 0; i < 16; ++i) {
    store_float(table.data(), dtype, static_cast<std::int64_t>(i), meaning[i]);
  }
  for (std::int64_t i = 0; i < count / 2; ++i) {
    const auto pair = std::to_integer<std::size_t>(values[i]);
    const T both[2] = {table[pair & 15U], table[pair >> 4]};
    std::memcpy(out + i * std::int64_t{sizeof both}, both, sizeof both);
  }
}

/// What the 16 codes of a group mean.
std::array<float, 16> meaning_of(const StoredLayout& layout, const std::byte* scales, float factor,
                                 std::int64_t group) {
  std::array<float, 16> meaning{};
  if (layout.format == WeightFormat::kInt4) {
    const Int4Scale scale = int4_scale(layout.int4, scales, layout.cols / layout.int4.group, group);
    for (int i = 0; i < 16; ++i) meaning[static_cast<std::size_t>(i)] = scale.value(i);
    return meaning;
  }
  const auto bits = std::to_integer<std::uint8_t>(scales[group]);
  const float scale =
      layout.format == WeightFormat::kMxfp4 ? e8m0_to_float(bits) : kE4M3[bits] * factor;
  for (std::size_t i = 0; i < 16; ++i) meaning[i] = kE2M1[i] * scale;
  return meaning;
}

/// One row of a format with two codes a byte.
void decode_groups(const StoredLayout& layout, const std::byte* values, const std::byte* scales,
                   float factor, DType dtype, std::byte* out) {
  const std::int64_t group = group_of(layout);
  for (std::int64_t i = 0; i < layout.cols / group; ++i) {
    const std::array<float, 16> meaning = meaning_of(layout, scales, factor, i);
    if (dtype == DType::kF32) {
      decode_nibbles<float>(values, group, meaning, dtype, out);
    } else {
      decode_nibbles<std::uint16_t>(values, group, meaning, dtype, out);
    }
    values += group / 2;
    out += group * size_of(dtype);
  }
}

}  // namespace

void check(const Int4Form& form) {
  const bool is_known = form.group == 32 || form.group == 64 || form.group == 128;
  if (!is_known) {
    fail(ErrorCode::kUnsupported,
         "int4 weights with a scale for {} values each: want 32, 64 or 128", form.group);
  }
  if (form.scale != DType::kF16 && form.scale != DType::kBF16) {
    fail(ErrorCode::kUnsupported, "int4 weights with scales of {}: want f16 or bf16",
         to_string(form.scale));
  }
}

std::int64_t StoredLayout::value_row_bytes() const {
  switch (format) {
    case WeightFormat::kExact: return cols * size_of(dtype);
    case WeightFormat::kE4M3: return cols;
    case WeightFormat::kMxfp4:
    case WeightFormat::kInt4:
    case WeightFormat::kNvfp4: return cols / 2;
    case WeightFormat::kQ8:
    case WeightFormat::kStored: refuse(format);
  }
  return 0;
}

std::int64_t StoredLayout::scale_rows() const {
  switch (format) {
    case WeightFormat::kExact: return 0;
    case WeightFormat::kE4M3: return blocks_of(rows);
    case WeightFormat::kMxfp4:
    case WeightFormat::kInt4:
    case WeightFormat::kNvfp4: return rows;
    case WeightFormat::kQ8:
    case WeightFormat::kStored: refuse(format);
  }
  return 0;
}

std::int64_t StoredLayout::scale_row_bytes() const {
  switch (format) {
    case WeightFormat::kExact: return 0;
    case WeightFormat::kE4M3: return std::int64_t{sizeof(float)} * blocks_of(cols);
    case WeightFormat::kMxfp4: return cols / kMxfp4Block;
    case WeightFormat::kInt4: return int4_row_bytes(int4, cols / int4.group);
    case WeightFormat::kNvfp4: return cols / kNvfp4Block;
    case WeightFormat::kQ8:
    case WeightFormat::kStored: refuse(format);
  }
  return 0;
}

void decode(const StoredLayout& layout, ConstStoredRows stored, DType dtype, void* out) {
  if (layout.format == WeightFormat::kExact) {
    row_ops::convert(layout.dtype, stored.values, dtype, out, layout.rows * layout.cols);
    return;
  }
  const bool is_e4m3 = layout.format == WeightFormat::kE4M3;
  const std::int64_t value_bytes = layout.value_row_bytes();
  const std::int64_t scale_bytes = layout.scale_row_bytes();
  const std::int64_t row_bytes = layout.cols * size_of(dtype);
  auto* to = static_cast<std::byte*>(out);
  for (std::int64_t row = 0; row < layout.rows; ++row) {
    const std::byte* values = stored.values + row * value_bytes;
    if (is_e4m3) {
      decode_e4m3(values, stored.scales + row / kE4M3Block * scale_bytes, layout.cols, dtype, to);
    } else {
      decode_groups(layout, values, stored.scales + row * scale_bytes, stored.factor, dtype, to);
    }
    to += row_bytes;
  }
}

}  // namespace switchyard
