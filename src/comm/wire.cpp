// Conversion of rows for the wire; bound by memory bandwidth, one call a row.
#include "comm/wire.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "comm/exchange_layout.hpp"
#include "core/fp8.hpp"
#include "core/half.hpp"

namespace switchyard {
namespace {

// One loop per pair of types, so that the compiler sees a plain conversion.
template <DType kType>
struct Element;
template <>
struct Element<DType::kF32> {
  using Storage = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};
template <>
struct Element<DType::kBF16> {
  using Storage = std::uint16_t;
  static float load(std::uint16_t bits) { return bf16_to_float(bits); }
  static std::uint16_t store(float value) { return float_to_bf16(value); }
};
template <>
struct Element<DType::kF16> {
  using Storage = std::uint16_t;
  static float load(std::uint16_t bits) { return f16_to_float(bits); }
  static std::uint16_t store(float value) { return float_to_f16(value); }
};

template <typename Body>
void with_type(DType type, const Body& body) {
  switch (type) {
    case DType::kBF16: body(Element<DType::kBF16>{}); break;
    case DType::kF16: body(Element<DType::kF16>{}); break;
    default: body(Element<DType::kF32>{}); break;
  }
}

void convert(const std::byte* from, DType from_type, std::byte* to, DType to_type, std::int64_t n) {
  with_type(from_type, [&]<typename From>(From) {
    with_type(to_type, [&]<typename To>(To) {
      const auto* source = reinterpret_cast<const typename From::Storage*>(from);
      auto* target = reinterpret_cast<typename To::Storage*>(to);
      for (std::int64_t i = 0; i < n; ++i) target[i] = To::store(From::load(source[i]));
    });
  });
}

void encode_fp8(const std::byte* row, DType type, std::byte* wire_row, float* scales,
                std::int64_t n) {
  with_type(type, [&]<typename From>(From) {
    const auto* source = reinterpret_cast<const typename From::Storage*>(row);
    auto* target = reinterpret_cast<std::uint8_t*>(wire_row);
    for (std::int64_t begin = 0; begin < n; begin += kScaleBlock) {
      const std::int64_t end = std::min(n, begin + kScaleBlock);
      float amax = 0x1p-100F;
      for (std::int64_t i = begin; i < end; ++i) {
        amax = std::max(amax, std::abs(From::load(source[i])));
      }
      const float inverse = kE4M3Max / amax;
      scales[begin / kScaleBlock] = amax / kE4M3Max;
      for (std::int64_t i = begin; i < end; ++i) {
        target[i] = float_to_e4m3(From::load(source[i]) * inverse);
      }
    }
  });
}

void decode_fp8(const std::byte* wire_row, const float* scales, std::byte* row, DType type,
                std::int64_t n) {
  with_type(type, [&]<typename To>(To) {
    const auto* source = reinterpret_cast<const std::uint8_t*>(wire_row);
    auto* target = reinterpret_cast<typename To::Storage*>(row);
    for (std::int64_t i = 0; i < n; ++i) {
      target[i] = To::store(e4m3_to_float(source[i]) * scales[i / kScaleBlock]);
    }
  });
}

}  // namespace

void encode_row(const std::byte* row, DType type, std::byte* wire_row, DType wire, float* scales,
                std::int64_t n) {
  if (wire == type) {
    std::memcpy(wire_row, row, static_cast<std::size_t>(n * size_of(type)));
  } else if (wire == DType::kF8E4M3) {
    encode_fp8(row, type, wire_row, scales, n);
  } else {
    convert(row, type, wire_row, wire, n);
  }
}

void decode_row(const std::byte* wire_row, DType wire, const float* scales, std::byte* row,
                DType type, std::int64_t n) {
  if (wire == type) {
    std::memcpy(row, wire_row, static_cast<std::size_t>(n * size_of(type)));
  } else if (wire == DType::kF8E4M3) {
    decode_fp8(wire_row, scales, row, type, n);
  } else {
    convert(wire_row, wire, row, type, n);
  }
}

}  // namespace switchyard
