// Packing of codes. Bound by memory: a table gives the bits of two codes at a time.
#include "experts/gpu/coded/pack.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "core/formats/int4.hpp"
#include "core/fp8.hpp"
#include "core/mxfp4.hpp"
#include "experts/gpu/coded/layout.hpp"

namespace switchyard::coded {
namespace {

constexpr std::uint8_t kNanScale = 0xff;

[[noreturn]] void refuse(const char* what, std::int64_t row, std::int64_t column) {
  fail(ErrorCode::kInvalidArgument, "{} of stored weights is not a number: row {}, column {}", what,
       row, column);
}

std::uint8_t byte_at(const std::byte* from, std::int64_t i) {
  return std::to_integer<std::uint8_t>(from[i]);
}

/// The bits of a byte of MXFP4, two codes, by its place in a word.
constexpr std::array<std::array<std::uint32_t, 256>, 4> make_words() {
  std::array<std::array<std::uint32_t, 256>, 4> words{};
  for (std::size_t place = 0; place < 4; ++place) {
    for (std::uint32_t codes = 0; codes < 256; ++codes) {
      words[place][codes] = mxfp4_word(codes << (8 * place));
    }
  }
  return words;
}
constexpr std::array<std::array<std::uint32_t, 256>, 4> kWords = make_words();

class Mxfp4 {
 public:
  Mxfp4(const StoredLayout& layout, ConstStoredRows stored, std::byte* out)
      : layout_(layout), stored_(stored), out_(out), blocks_(layout.cols / kMxfp4Block) {}

  Packed pack() {
    const std::uint8_t largest = largest_scale();
    for (std::int64_t row = 0; row < layout_.rows; ++row) {
      for (std::int64_t block = 0; block < blocks_; ++block) {
        put_scale(row, block, largest);
        for (std::int64_t eight = 0; eight < 4; ++eight) {
          const std::byte* codes = codes_of(row, block) + 4 * eight;
          const std::uint32_t word = kWords[0][byte_at(codes, 0)] | kWords[1][byte_at(codes, 1)] |
                                     kWords[2][byte_at(codes, 2)] | kWords[3][byte_at(codes, 3)];
          std::memcpy(out_ + place_of(WeightFormat::kMxfp4, layout_.cols, row,
                                      block * kMxfp4Block + 8 * eight),
                      &word, sizeof word);
        }
      }
    }
    return {.factor = e8m0_to_float(largest), .folds = most_below_ <= kMxfp4FoldedRange};
  }

 private:
  [[nodiscard]] const std::byte* codes_of(std::int64_t row, std::int64_t block) const {
    return stored_.values + row * layout_.value_row_bytes() + block * kMxfp4BlockBytes;
  }
  [[nodiscard]] std::uint8_t scale_of(std::int64_t row, std::int64_t block) const {
    return byte_at(stored_.scales, row * layout_.scale_row_bytes() + block);
  }
  /// Zeros of either sign.
  [[nodiscard]] bool is_zero(std::int64_t row, std::int64_t block) const {
    const std::byte* codes = codes_of(row, block);
    return std::all_of(codes, codes + kMxfp4BlockBytes,
                       [](std::byte two) { return (two & std::byte{0x77}) == std::byte{0}; });
  }
  [[nodiscard]] std::uint8_t largest_scale() const {
    std::uint8_t largest = 0;
    for (std::int64_t row = 0; row < layout_.rows; ++row) {
      for (std::int64_t block = 0; block < blocks_; ++block) {
        const std::uint8_t scale = scale_of(row, block);
        if (scale == kNanScale) refuse("a scale", row, block * kMxfp4Block);
        if (scale > largest && !is_zero(row, block)) largest = scale;
      }
    }
    return largest;
  }
  void put_scale(std::int64_t row, std::int64_t block, std::uint8_t largest) {
    int below = largest - int{scale_of(row, block)};
    // A block of zeros may have any scale.
    if ((below < 0 || below > kMxfp4FoldedRange) && is_zero(row, block)) below = 0;
    if (below > kMxfp4MostRange) {
      fail(ErrorCode::kUnsupported,
           "scales of mxfp4 weights from 2^{} (row {}, column {}) to 2^{}: a GPU takes 2^{} "
           "between them",
           scale_of(row, block) - 127, row, block * kMxfp4Block, largest - 127, kMxfp4MostRange);
    }
    most_below_ = std::max(most_below_, below);
    std::byte* const scale = out_ + scale_place_of(layout_.cols, row, block * kMxfp4Block);
    *scale = static_cast<std::byte>(kMxfp4LargestScale - below);
    // Half a unit: its lanes' codes have one scale, where both lie.
    if (block % 2 == 0 && block == blocks_ - 1) scale[1] = scale[0];
  }

  const StoredLayout& layout_;
  ConstStoredRows stored_;
  std::byte* out_;
  std::int64_t blocks_;
  int most_below_ = 0;
};

void pack_e4m3(const StoredLayout& layout, ConstStoredRows stored, std::byte* out) {
  for (std::int64_t row = 0; row < layout.rows; ++row) {
    const std::byte* codes = stored.values + row * layout.cols;
    for (std::int64_t column = 0; column < layout.cols; column += 8) {
      std::array<std::byte, 8> eight{};
      const std::int64_t count = std::min<std::int64_t>(8, layout.cols - column);
      std::memcpy(eight.data(), codes + column, static_cast<std::size_t>(count));
      for (std::size_t i = 0; i < 8; ++i) {
        if ((eight[i] & std::byte{0x7f}) == std::byte{0x7f}) {
          refuse("a code", row, column + static_cast<std::int64_t>(i));
        }
      }
      std::memcpy(out + place_of(WeightFormat::kE4M3, layout.cols, row, column), eight.data(),
                  eight.size());
    }
  }
}

/// Where a scale is no number, in a row of them: its group, or -1.
std::int64_t bad_scale(const StoredLayout& layout, const std::byte* scales) {
  const bool int4 = layout.format == WeightFormat::kInt4;
  const std::int64_t groups = layout.cols / (int4 ? layout.int4.group : kNvfp4Block);
  for (std::int64_t i = 0; i < groups; ++i) {
    const bool is_number = int4 ? std::isfinite(int4_scale_at(layout.int4, scales + 2 * i))
                                : (byte_at(scales, i) & 0x7f) != 0x7f;
    if (!is_number) return i;
  }
  return -1;
}

/// Of int4 or NVFP4: values, then scales.
float pack_as_stored(const StoredLayout& layout, ConstStoredRows stored, std::byte* out) {
  const std::int64_t group =
      layout.format == WeightFormat::kInt4 ? std::int64_t{layout.int4.group} : kNvfp4Block;
  for (std::int64_t row = 0; row < layout.rows; ++row) {
    const std::int64_t bad = bad_scale(layout, stored.scales + row * layout.scale_row_bytes());
    if (bad >= 0) refuse("a scale", row, bad * group);
  }
  if (!std::isfinite(stored.factor)) refuse("the factor of the scales", 0, 0);
  std::memcpy(out, stored.values, static_cast<std::size_t>(layout.value_bytes()));
  std::memcpy(out + layout.value_bytes(), stored.scales,
              static_cast<std::size_t>(layout.scale_bytes()));
  return layout.format == WeightFormat::kInt4 ? 1 : stored.factor;
}

float bf16_to_float(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

/// The two numbers of a pair, too small as it is.
void put_pair(std::uint32_t pair, double raise, float* out) {
  out[0] = static_cast<float>(bf16_to_float(pair & 0xffffU) * raise);
  out[1] = static_cast<float>(bf16_to_float(pair >> 16) * raise);
}

void unpack_mxfp4_word(std::uint32_t word, double raise, float* out) {
  put_pair(mxfp4_pair<0>(word), raise, out);
  put_pair(mxfp4_pair<1>(word), raise, out + 2);
  put_pair(mxfp4_pair<2>(word), raise, out + 4);
  put_pair(mxfp4_pair<3>(word), raise, out + 6);
}

}  // namespace

std::int64_t bytes_of(const StoredLayout& layout) {
  if (unit_bytes(layout.format) != 0) return matrix_bytes(layout.format, layout.rows, layout.cols);
  return (layout.value_bytes() + layout.scale_bytes() + 15) / 16 * 16;
}

std::int64_t floats_of(const StoredLayout& layout) {
  switch (layout.format) {
    case WeightFormat::kMxfp4:
    case WeightFormat::kNvfp4: return 1;
    default: return block_scales(layout.format, layout.rows, layout.cols);
  }
}

Packed pack(const StoredLayout& layout, ConstStoredRows stored, std::byte* out) {
  switch (layout.format) {
    case WeightFormat::kMxfp4: return Mxfp4(layout, stored, out).pack();
    case WeightFormat::kE4M3: pack_e4m3(layout, stored, out); return {};
    case WeightFormat::kInt4:
    case WeightFormat::kNvfp4: return {.factor = pack_as_stored(layout, stored, out)};
    default:
      fail(ErrorCode::kInvalidArgument, "weights in {} are not packed for a GPU",
           to_string(layout.format));
  }
}

void unpack(WeightFormat format, std::int64_t cols, const std::byte* packed, float factor,
            const float* scales, std::int64_t first_row, std::int64_t num_rows, float* out) {
  for (std::int64_t at = 0; at < num_rows; ++at) {
    const std::int64_t row = first_row + at;
    const std::int64_t here = row - first_row / kGroupRows * kGroupRows;
    for (std::int64_t column = 0; column < cols; column += 8) {
      std::array<float, 8> eight{};
      const std::byte* from = packed + place_of(format, cols, here, column);
      if (format == WeightFormat::kMxfp4) {
        std::uint32_t word = 0;
        std::memcpy(&word, from, sizeof word);
        // 2^(exponent - 127) of what raises the codes, and the matrix's.
        const int exponent = byte_at(packed, scale_place_of(cols, here, column));
        unpack_mxfp4_word(word, std::ldexp(double{factor}, exponent - 127), eight.data());
      } else {
        const std::int64_t across = (cols + kE4M3Block - 1) / kE4M3Block;
        const float scale = scales[row / kE4M3Block * across + column / kE4M3Block];
        for (std::int64_t i = 0; i < 8; ++i) {
          eight[static_cast<std::size_t>(i)] = e4m3_to_float(byte_at(from, i)) * scale;
        }
      }
      const std::int64_t count = std::min<std::int64_t>(8, cols - column);
      std::copy_n(eight.data(), count, out + at * cols + column);
    }
  }
}

}  // namespace switchyard::coded
