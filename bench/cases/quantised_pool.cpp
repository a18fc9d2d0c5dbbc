#include "bench/cases/quantised_pool.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/half.hpp"
#include "testkit/random.hpp"

namespace switchyard::bench {
namespace {

constexpr std::int64_t kPool = 1 << 22;

std::uint64_t key_of(std::int32_t expert, ExpertPart part, std::int64_t row) {
  return Random(static_cast<std::uint64_t>(row) * 4 + static_cast<std::uint64_t>(part),
                static_cast<std::uint64_t>(expert))
      .bits();
}

}  // namespace

QuantisedPool::QuantisedPool(const ExpertConfig& config, WeightFormat format, std::uint64_t seed)
    : config_(config), format_(format), codes_(kPool) {
  Random random(seed);
  for (std::byte& code : codes_) {
    code = static_cast<std::byte>(random.bits() >> 56);
    const bool is_nan = (code & std::byte{0x7f}) == std::byte{0x7f};
    if (format == WeightFormat::kE4M3 && is_nan) code = std::byte{0};
  }
}

void QuantisedPool::read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                                std::int64_t num_rows, const StoredRows& out) const {
  const StoredLayout layout{
      .format = format_, .rows = num_rows, .cols = cols(part), .int4 = pool_form(config_)};
  const std::int64_t row_bytes = layout.value_row_bytes();
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const auto place = static_cast<std::int64_t>(key_of(expert, part, first_row + row) %
                                                 static_cast<std::uint64_t>(kPool - row_bytes));
    std::memcpy(out.values + row * row_bytes, codes_.data() + place,
                static_cast<std::size_t>(row_bytes));
  }
  // Codes of any bits are 157 (e4m3), 2.9 (e2m1) or 4.6 (int4) in the root of their mean square.
  const double per_term = 1 / std::sqrt(static_cast<double>(layout.cols));
  std::vector<std::byte> scale(sizeof(float));
  switch (format_) {
    case WeightFormat::kE4M3: {
      const auto value = static_cast<float>(per_term / 157);
      std::memcpy(scale.data(), &value, sizeof value);
      break;
    }
    case WeightFormat::kInt4: {
      const std::uint16_t bits = float_to_f16(static_cast<float>(per_term / 4.6));
      scale.resize(sizeof bits);
      std::memcpy(scale.data(), &bits, sizeof bits);
      break;
    }
    case WeightFormat::kNvfp4: scale = {std::byte{0x38}}; break;  // 1: stored_factor() is the rest
    default: {
      const auto power = static_cast<int>(std::lround(std::log2(per_term / 2.9)));
      scale = {static_cast<std::byte>(127 + power)};
    }
  }
  const std::int64_t size = std::ssize(scale);
  for (std::int64_t i = 0; i < layout.scale_bytes(); i += size) {
    std::copy_n(scale.begin(), size, out.scales + i);
  }
}

float QuantisedPool::stored_factor(std::int32_t /*expert*/, ExpertPart part) const {
  if (format_ != WeightFormat::kNvfp4) return 1;
  return static_cast<float>(1 / std::sqrt(static_cast<double>(cols(part))) / 2.9);
}

void QuantisedPool::read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                         std::int64_t num_rows, DType dtype, void* out) const {
  const StoredLayout layout{
      .format = format_, .rows = 1, .cols = cols(part), .int4 = pool_form(config_)};
  std::vector<std::byte> values(static_cast<std::size_t>(layout.value_bytes()));
  std::vector<std::byte> scales(static_cast<std::size_t>(layout.scale_bytes()));
  auto* to = static_cast<std::byte*>(out);
  for (std::int64_t row = 0; row < num_rows; ++row, to += layout.cols * size_of(dtype)) {
    read_stored(expert, part, first_row + row, 1, {values.data(), scales.data()});
    decode(layout, {values.data(), scales.data(), stored_factor(expert, part)}, dtype, to);
  }
}

void QuantisedPool::read_bias(std::int32_t expert, ExpertPart part, float* out) const {
  Random random(key_of(expert, part, -1));
  const std::int64_t rows = part == ExpertPart::kDown ? config_.hidden : config_.inner;
  for (std::int64_t i = 0; i < rows; ++i) out[i] = 0.1F * random.signed_unit();
}

}  // namespace switchyard::bench
