#pragma once

#include <cstdint>

namespace switchyard {

/// Leaves of the binary tree over `count` neighbours: the next power of two.
[[nodiscard]] constexpr std::int32_t tree_width(std::int32_t count) {
  std::int32_t width = 1;
  while (width < count) width *= 2;
  return width;
}

}  // namespace switchyard
