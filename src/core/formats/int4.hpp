#pragma once

// Weights of 4 bits in groups of a row: (code - zero point) * scale. What a row of scales holds, as
// StoredLayout has it.
// Source: GPTQ (arXiv 2210.17323), AWQ (arXiv 2306.00978), and the checkpoints of both.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/half.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard {

/// Of one group.
struct Int4Scale {
  float scale = 1;
  int zero = kInt4Zero;

  /// Exact for normal scales: 5 bits times 11 or 8. Of `code` = `zero` a zero of the scale's sign.
  [[nodiscard]] float value(int code) const { return static_cast<float>(code - zero) * scale; }
};

/// Bytes of a row of scales for so many groups.
[[nodiscard]] constexpr std::int64_t int4_row_bytes(const Int4Form& form, std::int64_t groups) {
  return 2 * groups + (form.zero_points ? (groups + 1) / 2 : 0);
}

/// f16 or bf16 at any address.
[[nodiscard]] inline float int4_scale_at(const Int4Form& form, const std::byte* at) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return form.scale == DType::kF16 ? f16_to_float(bits) : bf16_to_float(bits);
}

/// Of group `group` of a row of scales with so many groups.
[[nodiscard]] inline Int4Scale int4_scale(const Int4Form& form, const std::byte* row,
                                          std::int64_t groups, std::int64_t group) {
  Int4Scale found{.scale = int4_scale_at(form, row + 2 * group)};
  if (!form.zero_points) return found;
  const auto pair = std::to_integer<int>(row[2 * groups + group / 2]);
  found.zero = group % 2 == 0 ? pair & 15 : pair >> 4;
  return found;
}

}  // namespace switchyard
