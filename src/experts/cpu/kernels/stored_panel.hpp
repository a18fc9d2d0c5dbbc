#pragma once

// How stored weights lie in a panel of the CPU kernels: the codes as the checkpoint has them, in an
// order in which a register of them widens to neighbouring columns. Not for the files of an
// instruction set, which share no code.

#include <cstring>

#include "core/formats/int4.hpp"
#include "core/fp8.hpp"
#include "core/mxfp4.hpp"
#include "experts/cpu/kernels/kernels.hpp"

namespace switchyard::cpu {

/// A panel of `cols` columns in two halves. Four neighbouring depths of a half are 2 * cols codes,
/// column c of the half at depth d in place (c / 4) * 16 + (d / 2) * 8 + (c % 4) * 2 + d % 2. Where
/// two codes share a byte, the first half's is in the low four bits.
///
/// | storage | a panel                                                                 |
/// |---------|-------------------------------------------------------------------------|
/// | kE4M3   | [depth/128]{[2] f32 scales of the halves, [32][2][2 * cols] codes}      |
/// | kMxfp4  | [depth/32]{[cols] scales, [8][2 * cols] bytes}                          |
/// | kInt4   | [depth/group]{[cols] scales of 16 bits, with zero points [cols/2] bytes |
/// |         | of two, the first half's low; [group/4][2 * cols] bytes}                |
/// | kNvfp4  | [2] f32 factors of the halves, [depth/32]{[2][cols] scales, of the      |
/// |         | first 16 and of the others; [8][2 * cols] bytes}                        |
///
/// The last group only has codes for as much depth as the panel. A half of kE4M3 lies within one
/// row of blocks, for their 128 rows are a multiple of it.
class StoredPanel {
 public:
  StoredPanel(Storage storage, std::int64_t cols, const Int4Form& int4)
      : storage_(storage), cols_(cols), int4_(int4) {
    switch (storage) {
      case Storage::kE4M3:
        group_ = kE4M3Block;
        head_ = 2 * std::int64_t{sizeof(float)};
        break;
      case Storage::kInt4:
        group_ = int4.group;
        head_ = 2 * cols + (int4.zero_points ? cols / 2 : 0);
        break;
      case Storage::kNvfp4:
        before_ = 2 * std::int64_t{sizeof(float)};
        head_ = group_ / kNvfp4Block * cols;
        break;
      default: head_ = cols;
    }
  }
  StoredPanel(const Kernels& kernels)  // NOLINT(google-explicit-constructor)
      : StoredPanel(kernels.storage, kernels.panel_cols, kernels.int4) {}

  [[nodiscard]] std::int64_t depth_multiple() const { return is_e4m3() ? 4 : kWidenDepth; }
  /// Depths that share what lies before their codes.
  [[nodiscard]] std::int64_t group() const { return group_; }

  /// Of a panel of `depth`, a multiple of depth_multiple(); or before a depth in one.
  [[nodiscard]] std::int64_t bytes(std::int64_t depth) const {
    const std::int64_t rest = depth % group_;
    return before_ + depth / group_ * group_bytes() +
           (rest == 0 ? 0 : head_ + rest * depth_bytes());
  }

  /// The byte that a code is, or shares.
  [[nodiscard]] std::int64_t place(std::int64_t k, std::int64_t col) const {
    const std::int64_t half = cols_ / 2;
    const std::int64_t c = col % half;
    const std::int64_t in_four = c / 4 * 16 + k / 2 % 2 * 8 + c % 4 * 2 + k % 2;
    const std::int64_t of_half = is_e4m3() ? col / half * (2 * cols_) : 0;
    return group_place(k) + head_ + k % group_ / 4 * (4 * depth_bytes()) + of_half + in_four;
  }

  [[nodiscard]] std::uint8_t code(const std::byte* panel, std::int64_t k, std::int64_t col) const {
    const auto bits = std::to_integer<std::uint8_t>(panel[place(k, col)]);
    return is_e4m3() ? bits : nibble_of(bits, col);
  }
  /// Where the scale of a code lies: an f32, a byte, or 16 bits of kInt4.
  [[nodiscard]] std::int64_t scale_place(std::int64_t k, std::int64_t col) const {
    switch (storage_) {
      case Storage::kE4M3: return group_place(k) + factor_place(col);
      case Storage::kInt4: return group_place(k) + 2 * col;
      case Storage::kNvfp4: return group_place(k) + k % group_ / kNvfp4Block * cols_ + col;
      default: return group_place(k) + col;
    }
  }
  /// kInt4: the byte that a code's zero point shares with the other half's.
  [[nodiscard]] std::int64_t zero_place(std::int64_t k, std::int64_t col) const {
    return group_place(k) + 2 * cols_ + col % (cols_ / 2);
  }
  /// kNvfp4: of a half's factor.
  [[nodiscard]] std::int64_t factor_place(std::int64_t col) const {
    return in_first_half(col) ? 0 : std::int64_t{sizeof(float)};
  }

  /// What a code means, as decode() has it.
  [[nodiscard]] float value(const std::byte* panel, std::int64_t k, std::int64_t col) const {
    const std::uint8_t bits = code(panel, k, col);
    const std::byte* at = panel + scale_place(k, col);
    switch (storage_) {
      case Storage::kE4M3: return e4m3_to_float(bits) * float_at(at);
      case Storage::kInt4: {
        Int4Scale scale{.scale = int4_scale_at(int4_, at)};
        if (int4_.zero_points) {
          scale.zero = nibble_of(std::to_integer<std::uint8_t>(panel[zero_place(k, col)]), col);
        }
        return scale.value(bits);
      }
      case Storage::kNvfp4:
        return kE2M1[bits] * (e4m3_to_float(std::to_integer<std::uint8_t>(*at)) *
                              float_at(panel + factor_place(col)));
      default: return kE2M1[bits] * e8m0_to_float(std::to_integer<std::uint8_t>(*at));
    }
  }

  [[nodiscard]] static float float_at(const std::byte* at) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }

 private:
  [[nodiscard]] bool is_e4m3() const { return storage_ == Storage::kE4M3; }
  [[nodiscard]] bool in_first_half(std::int64_t col) const { return col < cols_ / 2; }
  [[nodiscard]] std::uint8_t nibble_of(std::uint8_t bits, std::int64_t col) const {
    return in_first_half(col) ? bits & 15U : static_cast<std::uint8_t>(bits >> 4);
  }
  /// Bytes of codes for each depth.
  [[nodiscard]] std::int64_t depth_bytes() const { return is_e4m3() ? cols_ : cols_ / 2; }
  [[nodiscard]] std::int64_t group_bytes() const { return head_ + group_ * depth_bytes(); }
  [[nodiscard]] std::int64_t group_place(std::int64_t k) const {
    return before_ + k / group_ * group_bytes();
  }

  Storage storage_;
  std::int64_t cols_;
  Int4Form int4_;
  std::int64_t group_ = 32;
  std::int64_t before_ = 0;  ///< Bytes before the first group.
  std::int64_t head_ = 0;    ///< Before the codes of each.
};

}  // namespace switchyard::cpu
