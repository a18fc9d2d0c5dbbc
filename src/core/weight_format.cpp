// The formats of expert weights: their sizes in memory, and what their codes mean.
#include "switchyard/weight_format.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.hpp"
#include "core/fp8.hpp"
#include "core/half.hpp"
#include "core/mxfp4.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

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

/// The 32 values of a block from a table of its 16: each is rounded once, not per use.
template <typename T>
void decode_mxfp4_block(const std::byte* values, float scale, DType dtype, std::byte* out) {
  std::array<T, 16> table{};
  for (std::size_t i = 0; i < 16; ++i) {
    store_float(table.data(), dtype, static_cast<std::int64_t>(i), kE2M1[i] * scale);
  }
  std::array<T, kMxfp4Block> block{};
  for (std::size_t i = 0; i < kMxfp4BlockBytes; ++i) {
    const auto pair = std::to_integer<std::size_t>(values[i]);
    block[2 * i] = table[pair & 15U];
    block[2 * i + 1] = table[pair >> 4];
  }
  std::memcpy(out, block.data(), sizeof block);
}

/// One row.
void decode_mxfp4(const std::byte* values, const std::byte* scales, std::int64_t cols, DType dtype,
                  std::byte* out) {
  for (std::int64_t block = 0; block < cols / kMxfp4Block; ++block) {
    const float scale = e8m0_to_float(std::to_integer<std::uint8_t>(scales[block]));
    if (dtype == DType::kF32) {
      decode_mxfp4_block<float>(values, scale, dtype, out);
    } else {
      decode_mxfp4_block<std::uint16_t>(values, scale, dtype, out);
    }
    values += kMxfp4BlockBytes;
    out += kMxfp4Block * size_of(dtype);
  }
}

}  // namespace

std::int64_t StoredLayout::value_row_bytes() const {
  switch (format) {
    case WeightFormat::kExact: return cols * size_of(dtype);
    case WeightFormat::kE4M3: return cols;
    case WeightFormat::kMxfp4: return cols / 2;
    case WeightFormat::kQ8:
    case WeightFormat::kStored: refuse(format);
  }
  return 0;
}

std::int64_t StoredLayout::scale_rows() const {
  switch (format) {
    case WeightFormat::kExact: return 0;
    case WeightFormat::kE4M3: return blocks_of(rows);
    case WeightFormat::kMxfp4: return rows;
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
      decode_mxfp4(values, stored.scales + row * scale_bytes, layout.cols, dtype, to);
    }
    to += row_bytes;
  }
}

}  // namespace switchyard
