#include "core/printable.hpp"

#include <fmt/core.h>

#include <cstdint>

#include "core/utf8.hpp"

namespace switchyard {
namespace {

/// Moves the cursor, ends the line, or turns the direction of what follows.
bool is_control(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x061c || code == 0x200e ||
         code == 0x200f || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

std::string escaped(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Utf8Character character = first_character(text);
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
