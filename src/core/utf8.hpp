#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace switchyard {

/// A character of UTF-8: its bytes, 0 where they are none, and its number.
struct Utf8Character {
  std::size_t bytes = 0;
  std::uint32_t code = 0;
};

/// Of a text that is not empty. Surrogates, numbers in more bytes than they need and numbers above
/// 0x10ffff are none.
[[nodiscard]] inline Utf8Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return {1, byte(0)};
  struct Lead {
    unsigned mask, bits;
    std::uint32_t least;  ///< A smaller number would have fewer bytes.
  };
  constexpr std::array<Lead, 3> kLeads = {
      {{0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}}};
  for (std::size_t more = 1; more <= kLeads.size(); ++more) {
    const Lead& lead = kLeads[more - 1];
    if ((byte(0) & lead.mask) != lead.bits || text.size() <= more) continue;
    std::uint32_t code = byte(0) & ~lead.mask;
    for (std::size_t i = 1; i <= more; ++i) {
      if ((byte(i) & 0xc0U) != 0x80) return {};
      code = code << 6 | (byte(i) & 0x3fU);
    }
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    if (code < lead.least || code > 0x10ffff || surrogate) return {};
    return {more + 1, code};
  }
  return {};
}

}  // namespace switchyard
