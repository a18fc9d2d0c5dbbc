#include "bench/cases/quantised_pool.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

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
  const StoredLayout layout{.format = format_, .rows = num_rows, .cols = cols(part)};
  const std::int64_t row_bytes = layout.value_row_bytes();
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const auto place = static_cast<std::int64_t>(key_of(expert, part, first_row + row) %
                                                 static_cast<std::uint64_t>(kPool - row_bytes));
    std::memcpy(out.values + row * row_bytes, codes_.data() + place,
                static_cast<std::size_t>(row_bytes));
  }
  // Codes of any bits are 157 (e4m3) or 2.9 (e2m1) in the root of their mean square.
  const double per_term = 1 / std::sqrt(static_cast<double>(layout.cols));
  if (format_ == WeightFormat::kE4M3) {
    const auto scale = static_cast<float>(per_term / 157);
    for (std::int64_t i = 0; i < layout.scale_bytes(); i += std::int64_t{sizeof scale}) {
      std::memcpy(out.scales + i, &scale, sizeof scale);
    }
  } else {
    const auto power = static_cast<int>(std::lround(std::log2(per_term / 2.9)));
    std::fill_n(out.scales, layout.scale_bytes(), static_cast<std::byte>(127 + power));
  }
}

void QuantisedPool::read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                         std::int64_t num_rows, DType dtype, void* out) const {
  const StoredLayout layout{.format = format_, .rows = 1, .cols = cols(part)};
  std::vector<std::byte> values(static_cast<std::size_t>(layout.value_bytes()));
  std::vector<std::byte> scales(static_cast<std::size_t>(layout.scale_bytes()));
  auto* to = static_cast<std::byte*>(out);
  for (std::int64_t row = 0; row < num_rows; ++row, to += layout.cols * size_of(dtype)) {
    read_stored(expert, part, first_row + row, 1, {values.data(), scales.data()});
    decode(layout, {values.data(), scales.data()}, dtype, to);
  }
}

void QuantisedPool::read_bias(std::int32_t expert, ExpertPart part, float* out) const {
  Random random(key_of(expert, part, -1));
  const std::int64_t rows = part == ExpertPart::kDown ? config_.hidden : config_.inner;
  for (std::int64_t i = 0; i < rows; ++i) out[i] = 0.1F * random.signed_unit();
}

}  // namespace switchyard::bench
