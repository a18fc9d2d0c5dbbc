#pragma once

#include <cstdint>

#include "core/gpu/host_device.hpp"

namespace switchyard {

/// Where 16-byte chunk `chunk` of row `row` lies in a tile of shared memory whose rows of 128 (or
/// 64) bytes follow each other, as TMA and wgmma swizzle it: within a line of 128 bytes chunks
/// change places by xor with the line's number, again the same after 8 (4) lines. The eight rows of
/// a matrix that ldmatrix, stmatrix or wgmma takes lie in eight different banks of 16 bytes. The
/// tile begins at a multiple of 1024 bytes. tests/cuda/static_layouts_test.cu holds it against
/// CuTe's Swizzle.
template <int kRowBytes>
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t swizzled_place(int row, int chunk) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr int kLines = kRowBytes / 16;  // until the pattern repeats
  const int plain = row * kRowBytes + chunk * 16;
  return static_cast<std::uint32_t>(plain ^ ((plain >> 7 & (kLines - 1)) << 4));
}

/// The same for rows of 128 bytes below the eighth, with less to compute.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t swizzled_place_of_eight(int row, int chunk) {
  return static_cast<std::uint32_t>(row * 128 + ((chunk ^ row) << 4));
}

}  // namespace switchyard
