#include "core/printable.hpp"

#include <fmt/core.h>

#include <array>
#include <cstdint>

namespace switchyard {
namespace {

/// A character of UTF-8: its bytes, 0 where they are none, and its number.
struct Character {
  std::size_t bytes = 0;
  std::uint32_t code = 0;
};

Character first_character(std::string_view text) {
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

/// Moves the cursor, ends the line, or turns the direction of what follows.
bool is_control(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x061c || code == 0x200e ||
         code == 0x200f || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

std::string escaped(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Character character = first_character(text);
    const std::size_t bytes = character.bytes == 0 ? 1 : character.bytes;
    if (character.bytes == 0 || is_control(character.code)) {
      for (std::size_t i = 0; i < bytes; ++i) {
        out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
      }
    } else {
      out += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  return out;
}

/// Where the character begins that has the byte `at`; it has at most three bytes before that one.
std::size_t begin_of_character(std::string_view text, std::size_t at) {
  std::size_t begin = at;
  while (begin > 0 && at - begin < 3 && (static_cast<unsigned char>(text[begin]) & 0xc0U) == 0x80) {
    --begin;
  }
  return begin;
}

}  // namespace

std::string printable(std::string_view text, std::size_t most) {
  if (text.size() <= most) return escaped(text);
  const std::string_view head = text.substr(0, begin_of_character(text, most / 4 * 3));
  const std::string_view tail = text.substr(begin_of_character(text, text.size() - most / 4));
  return fmt::format("{}...[{} bytes in all]...{}", escaped(head), text.size(), escaped(tail));
}

}  // namespace switchyard
