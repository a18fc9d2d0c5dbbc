#include "checkpoint/convert.hpp"

#include <cstring>

#include "core/half.hpp"

namespace switchyard {
namespace {

template <DType kType>
using Bits = std::conditional_t<kType == DType::kF32, float, std::uint16_t>;

template <DType kType>
float widen(Bits<kType> value) {
  if constexpr (kType == DType::kF32) return value;
  if constexpr (kType == DType::kBF16) return bf16_to_float(value);
  if constexpr (kType == DType::kF16) return f16_to_float(value);
}

template <DType kType>
Bits<kType> narrow(float value) {
  if constexpr (kType == DType::kF32) return value;
  if constexpr (kType == DType::kBF16) return float_to_bf16(value);
  if constexpr (kType == DType::kF16) return float_to_f16(value);
}

template <DType kFrom, DType kTo>
void convert_values(const void* from, void* to, std::int64_t count) {
  const auto* bytes = static_cast<const std::byte*>(from);
  auto* out = static_cast<Bits<kTo>*>(to);
  for (std::int64_t i = 0; i < count; ++i) {
    Bits<kFrom> value;
    std::memcpy(&value, bytes + i * std::int64_t{sizeof value}, sizeof value);
    out[i] = narrow<kTo>(widen<kFrom>(value));
  }
}

template <DType kFrom>
void convert_from(const void* from, void* to, DType to_type, std::int64_t count) {
  switch (to_type) {
    case DType::kBF16: return convert_values<kFrom, DType::kBF16>(from, to, count);
    case DType::kF16: return convert_values<kFrom, DType::kF16>(from, to, count);
    default: return convert_values<kFrom, DType::kF32>(from, to, count);
  }
}

}  // namespace

void convert(const void* from, DType from_type, void* to, DType to_type, std::int64_t count) {
  if (count == 0) return;
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<std::size_t>(count * size_of(to_type)));
    return;
  }
  switch (from_type) {
    case DType::kBF16: return convert_from<DType::kBF16>(from, to, to_type, count);
    case DType::kF16: return convert_from<DType::kF16>(from, to, to_type, count);
    default: return convert_from<DType::kF32>(from, to, to_type, count);
  }
}

}  // namespace switchyard
