#include "checkpoint/made/made_tensor.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "core/row_ops.hpp"
#include "core/splitmix64.hpp"

namespace switchyard {
namespace {

/// FNV-1a, 64 bits.
constexpr std::uint64_t hash(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325U;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return value;
}

/// Random bits as a counter: number i of a stream needs no other number.
struct Stream {
  std::uint64_t key;
  [[nodiscard]] std::uint64_t operator()(std::int64_t i) const {
    return splitmix64_mix(key + static_cast<std::uint64_t>(i + 1) * kSplitMix64Step);
  }
};

/// Sum of four uniform 16-bit numbers, centred: within +-131070, deviation 37837 (2^15.2).
constexpr std::int32_t bell(std::uint64_t bits) {
  const std::uint64_t sum =
      (bits & 0xffffU) + (bits >> 16 & 0xffffU) + (bits >> 32 & 0xffffU) + (bits >> 48);
  return static_cast<std::int32_t>(sum) - 131070;
}

/// 2^exponent; products with it are exact.
constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// The whole number nearest above log2(fan_in) / 2: 1/sqrt(fan_in) is about 2^-it.
int half_log2(std::int64_t fan_in) {
  return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(fan_in - 1)) + 1) / 2;
}

std::uint8_t make_byte(Fill fill, std::uint64_t bits, int shift) {
  const auto byte = static_cast<std::uint8_t>(bits >> 56);
  switch (fill) {
    // The deviation of E2M1 codes is 2.9: two binary places less on average.
    case Fill::kMxfp4Scale: return static_cast<std::uint8_t>(127 - shift - 2 + (byte & 1));
    case Fill::kInt4Zeros: return static_cast<std::uint8_t>(0x77 + (byte & 0x11));
    case Fill::kNvfp4Scale: return static_cast<std::uint8_t>(0x30 + (byte & 15));
    case Fill::kF8: return (byte & 0x7fU) == 0x7fU ? static_cast<std::uint8_t>(byte - 1) : byte;
    default: return byte;
  }
}

/// What the floating-point fills make of random bits: offset + factor * whole number, exact but for
/// the last rounding.
struct Affine {
  float offset;
  float factor;
};

Affine affine_of(Fill fill, int shift) {
  switch (fill) {
    case Fill::kNorm: return {1.0F, power_of_two(-20)};
    case Fill::kBias: return {0.0F, power_of_two(-19)};
    default: return {0.0F, power_of_two(-15 - shift)};
  }
}

/// Of scales, which are between 1 and 2 times a power of two, in steps of 2^-12: its exponent, by
/// the deviation of codes: 101 of F8_E4M3, 4.6 of int4, 2.9 of E2M1.
std::optional<int> exponent_of(Fill fill, int shift) {
  switch (fill) {
    case Fill::kF8Scale: return -7 - shift;
    case Fill::kInt4Scale: return -3 - shift;
    case Fill::kNvfp4Factor: return -2 - shift;
    case Fill::kNvfp4Divisor: return 1 + shift;
    default: return {};
  }
}

}  // namespace

void make_elements(const MadeTensor& tensor, std::uint64_t seed, std::int64_t first,
                   std::int64_t count, void* out) {
  const Stream stream{splitmix64_mix(seed) ^ hash(tensor.spec.name)};
  const int shift = half_log2(tensor.fan_in);
  if (tensor.fill == Fill::kGroupIndex) {
    auto* words = static_cast<std::int32_t*>(out);
    for (std::int64_t i = 0; i < count; ++i) {
      words[i] = static_cast<std::int32_t>((first + i) / tensor.fan_in);
    }
    return;
  }
  if (!is_float(tensor.spec.type)) {
    const std::int64_t size = size_of(tensor.spec.type);
    auto* bytes = static_cast<std::uint8_t*>(out);
    for (std::int64_t i = 0; i < size * count; ++i) {
      bytes[i] = make_byte(tensor.fill, stream(size * first + i), shift);
    }
    return;
  }
  const DType dtype = *dtype_of(tensor.spec.type);
  const std::optional<int> exponent = exponent_of(tensor.fill, shift);
  const auto [offset, factor] = exponent
                                    ? Affine{power_of_two(*exponent), power_of_two(*exponent - 12)}
                                    : affine_of(tensor.fill, shift);
  auto* to = static_cast<std::byte*>(out);
  std::array<float, 1024> values;  // stays in the first cache between making and converting
  constexpr auto kValues = static_cast<std::int64_t>(values.size());
  for (std::int64_t begin = 0; begin < count; begin += kValues) {
    const std::int64_t num = std::min(kValues, count - begin);
    for (std::int64_t i = 0; i < num; ++i) {
      const std::uint64_t bits = stream(first + begin + i);
      const std::int32_t whole = exponent ? static_cast<std::int32_t>(bits >> 52) : bell(bits);
      values[static_cast<std::size_t>(i)] = offset + static_cast<float>(whole) * factor;
    }
    row_ops::narrow(dtype, values.data(), to + begin * size_of(dtype), num);
  }
}

}  // namespace switchyard
