#pragma once

// How stored weights (e4m3, MXFP4) lie in a panel of the CPU kernels: the codes as the checkpoint
// has them, in an order in which a register of them widens to neighbouring columns. Not for the
// files of an instruction set, which share no code.

#include <cstring>

#include "core/fp8.hpp"
#include "core/mxfp4.hpp"
#include "experts/cpu/kernels/kernels.hpp"

namespace switchyard::cpu {

/// A panel of `cols` columns in two halves. Four neighbouring depths of a half are 2 * cols codes,
/// column c of the half at depth d in place (c / 4) * 16 + (d / 2) * 8 + (c % 4) * 2 + d % 2.
///
/// kE4M3: [depth/128]{[2] f32 scales of the halves, [32][2][2 * cols] codes}, the last block only
/// as deep as the panel. A half lies within one row of blocks, for their 128 rows are a multiple of
/// it. kMxfp4: [depth/32]{[cols] scales, [8][2 * cols] bytes}, the first half's code in the low
/// four bits.
class StoredPanel {
 public:
  StoredPanel(Storage storage, std::int64_t cols) : e4m3_(storage == Storage::kE4M3), cols_(cols) {}

  [[nodiscard]] std::int64_t depth_multiple() const { return e4m3_ ? 4 : kMxfp4Block; }

  /// Of a panel of `depth`, a multiple of depth_multiple(); or before a depth in one.
  [[nodiscard]] std::int64_t bytes(std::int64_t depth) const {
    if (!e4m3_) return depth / kMxfp4Block * mxfp4_bytes();
    const std::int64_t rest = depth % kE4M3Block;
    return depth / kE4M3Block * e4m3_bytes() + (rest == 0 ? 0 : 8 + rest * cols_);
  }

  /// The byte that a code is, or shares.
  [[nodiscard]] std::int64_t place(std::int64_t k, std::int64_t col) const {
    const std::int64_t half = cols_ / 2;
    const std::int64_t c = col % half;
    const std::int64_t in_four = c / 4 * 16 + k / 2 % 2 * 8 + c % 4 * 2 + k % 2;
    if (!e4m3_) {
      return k / kMxfp4Block * mxfp4_bytes() + cols_ + k % kMxfp4Block / 4 * (2 * cols_) + in_four;
    }
    return k / kE4M3Block * e4m3_bytes() + 8 + k % kE4M3Block / 4 * (4 * cols_) +
           col / half * (2 * cols_) + in_four;
  }

  [[nodiscard]] std::uint8_t code(const std::byte* panel, std::int64_t k, std::int64_t col) const {
    const auto bits = std::to_integer<std::uint8_t>(panel[place(k, col)]);
    if (e4m3_) return bits;
    return in_first_half(col) ? bits & 15U : static_cast<std::uint8_t>(bits >> 4);
  }
  /// Where the scale of a code lies: an f32, or a byte.
  [[nodiscard]] std::int64_t scale_place(std::int64_t k, std::int64_t col) const {
    if (!e4m3_) return k / kMxfp4Block * mxfp4_bytes() + col;
    return k / kE4M3Block * e4m3_bytes() + (in_first_half(col) ? 0 : 4);
  }
  [[nodiscard]] float scale(const std::byte* panel, std::int64_t k, std::int64_t col) const {
    const std::byte* at = panel + scale_place(k, col);
    if (!e4m3_) return e8m0_to_float(std::to_integer<std::uint8_t>(*at));
    float scale = 0;
    std::memcpy(&scale, at, sizeof scale);
    return scale;
  }

  /// What a code means, as decode() has it: the product in f32.
  [[nodiscard]] float value(const std::byte* panel, std::int64_t k, std::int64_t col) const {
    const std::uint8_t bits = code(panel, k, col);
    return (e4m3_ ? e4m3_to_float(bits) : kE2M1[bits]) * scale(panel, k, col);
  }

 private:
  [[nodiscard]] std::int64_t e4m3_bytes() const { return 8 + kE4M3Block * cols_; }
  [[nodiscard]] std::int64_t mxfp4_bytes() const { return cols_ + kMxfp4Block / 2 * cols_; }
  [[nodiscard]] bool in_first_half(std::int64_t col) const { return col < cols_ / 2; }

  bool e4m3_;
  std::int64_t cols_;
};

}  // namespace switchyard::cpu
