// Conversion of rows for the wire; bound by memory bandwidth, one call a row.
#include "comm/host/wire.hpp"

#include <algorithm>
#include <cmath>

#include "comm/exchange_layout.hpp"
#include "core/fp8.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

void encode_fp8(const std::byte* row, DType type, std::byte* wire_row, float* scales,
                std::int64_t n) {
  auto* target = reinterpret_cast<std::uint8_t*>(wire_row);
  float block[kScaleBlock];
  for (std::int64_t begin = 0; begin < n; begin += kScaleBlock) {
    const std::int64_t count = std::min(kScaleBlock, n - begin);
    row_ops::widen(type, row + begin * size_of(type), block, count);
    float amax = 0x1p-100F;
    for (std::int64_t i = 0; i < count; ++i) amax = std::max(amax, std::abs(block[i]));
    const float inverse = kE4M3Max / amax;
    scales[begin / kScaleBlock] = amax / kE4M3Max;
    for (std::int64_t i = 0; i < count; ++i) target[begin + i] = float_to_e4m3(block[i] * inverse);
  }
}

void decode_fp8(const std::byte* wire_row, const float* scales, std::byte* row, DType type,
                std::int64_t n) {
  const auto* source = reinterpret_cast<const std::uint8_t*>(wire_row);
  float block[kScaleBlock];
  for (std::int64_t begin = 0; begin < n; begin += kScaleBlock) {
    const std::int64_t count = std::min(kScaleBlock, n - begin);
    const float scale = scales[begin / kScaleBlock];
    for (std::int64_t i = 0; i < count; ++i) block[i] = e4m3_to_float(source[begin + i]) * scale;
    row_ops::narrow(type, block, row + begin * size_of(type), count);
  }
}

}  // namespace

void encode_row(const std::byte* row, DType type, std::byte* wire_row, DType wire, float* scales,
                std::int64_t n) {
  if (wire == DType::kF8E4M3) {
    encode_fp8(row, type, wire_row, scales, n);
  } else {
    row_ops::convert(type, row, wire, wire_row, n);
  }
}

void decode_row(const std::byte* wire_row, DType wire, const float* scales, std::byte* row,
                DType type, std::int64_t n) {
  if (wire == DType::kF8E4M3) {
    decode_fp8(wire_row, scales, row, type, n);
  } else {
    row_ops::convert(wire, wire_row, type, row, n);
  }
}

void round_to_wire(DType wire, float* row, std::int64_t n) {
  std::byte crossing[kScaleBlock * sizeof(float)];
  for (std::int64_t begin = 0; begin < n; begin += kScaleBlock) {
    const std::int64_t count = std::min(kScaleBlock, n - begin);
    auto* block = reinterpret_cast<std::byte*>(row + begin);
    float scale = 0;
    encode_row(block, DType::kF32, crossing, wire, &scale, count);
    decode_row(crossing, wire, &scale, block, DType::kF32, count);
  }
}

}  // namespace switchyard
