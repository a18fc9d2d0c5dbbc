#pragma once

// Where the codes of stored weights lie on a GPU, so that kernels which multiply them by mma.sync
// read each lane's share with one aligned load, without a shuffle and without a bank conflict.
// int4 and NVFP4, which no such kernel reads yet, lie as they are stored (pack.hpp).
//
// A unit is 8 rows of a matrix by 64 columns, which are two steps of 32 along the sum. Lane (g, t)
// = (lane / 4, lane % 4) owns 8 columns of each step of row g: e4m3 8t .. 8t + 7, MXFP4 as
// mxfp4_place() says. Units of the same 8 rows follow each other along the sum, 8 rows follow 8
// rows: what a block of a kernel streams is one run of memory for every 8 rows.
//
//   MXFP4: 8 bytes a lane (a word of 8 codes for each step), then the scales: 2 bytes a row. Shifts
//          and masks of a word give pairs of bf16 numbers that are too small by a power of two;
//          either half of it chooses four bytes of a table of e5m2.
//   e4m3:  in order, 16 bytes of each of the 8 rows, then the next 16 columns: what wgmma takes
//          without a swizzle, for many rows. A lane has 8 bytes a step. The f32 scales of blocks
//          stay as they are stored.

#include <cstdint>

#include "core/gpu/host_device.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard::coded {

inline constexpr int kGroupRows = 8;
inline constexpr int kStepValues = 32;
inline constexpr int kUnitValues = 64;
inline constexpr int kMxfp4ScalesAt = 256;
inline constexpr int kMxfp4UnitBytes = kMxfp4ScalesAt + 16;
inline constexpr int kE4M3StepBytes = 256;
inline constexpr int kE4M3UnitBytes = 2 * kE4M3StepBytes;

/// Bytes of a unit; 0: a format that is not kept in units.
constexpr int unit_bytes(WeightFormat format) {
  if (format == WeightFormat::kMxfp4) return kMxfp4UnitBytes;
  return format == WeightFormat::kE4M3 ? kE4M3UnitBytes : 0;
}
constexpr std::int64_t units_of(std::int64_t cols) {
  return (cols + kUnitValues - 1) / kUnitValues;
}
constexpr std::int64_t groups_of(std::int64_t rows) { return (rows + kGroupRows - 1) / kGroupRows; }
/// Bytes of 8 rows, and from these to the next.
constexpr std::int64_t group_bytes(WeightFormat format, std::int64_t cols) {
  return units_of(cols) * unit_bytes(format);
}
/// Bytes of a matrix in units; a multiple of 16.
constexpr std::int64_t matrix_bytes(WeightFormat format, std::int64_t rows, std::int64_t cols) {
  return groups_of(rows) * group_bytes(format, cols);
}
/// Scales beside the codes, f32 [ceil(rows / 128), ceil(cols / 128)]; only e4m3 has them.
constexpr std::int64_t block_scales(WeightFormat format, std::int64_t rows, std::int64_t cols) {
  if (format != WeightFormat::kE4M3) return 0;
  return (rows + kE4M3Block - 1) / kE4M3Block * ((cols + kE4M3Block - 1) / kE4M3Block);
}

// Of the bits of half a word, one number of a pair in each.
inline constexpr std::uint32_t kSigns = 0x80008000U;
/// MXFP4: exponent and mantissa where the lowest of bf16's exponent and the highest of its mantissa
/// are: a number that is 2^126 too small, also where its exponent is 0.
inline constexpr std::uint32_t kMxfp4Mask = 0x01c001c0U;
inline constexpr int kMxfp4At = 6;
/// e4m3, likewise: 2^120 too small.
inline constexpr std::uint32_t kE4M3Mask = 0x07f007f0U;
inline constexpr int kE4M3At = 4;
inline constexpr std::uint32_t kE4M3Raise = 0x7b807b80U;  // 2^120, twice

/// A scale of MXFP4 in these units is the exponent of what raises its codes: 2^126 for the largest
/// scale of the matrix, which is a factor of its sums; so the scales cost no operation.
inline constexpr int kMxfp4LargestScale = 253;
/// Smaller ones than by so many powers of two would not leave normal numbers.
inline constexpr int kMxfp4MostRange = 120;
/// Times a byte: the power of two in both halves.
inline constexpr std::uint32_t kMxfp4Exponents = 0x00800080U;

/// Where a word of MXFP4 has the code of column c of 8: its lower half those of even columns, its
/// upper half the others.
SWITCHYARD_HOST_DEVICE constexpr int mxfp4_at(int column) {
  return column % 2 * 16 + column / 2 * 4;
}

// Where the scales of a matrix are within kMxfp4FoldedRange powers of two, its codes are numbers of
// e5m2 with their scales in them: 0.5 to 6 times 2^-13 to 2^13, none of them too small for an
// implied bit. Such a number is the code's in a table of eight bytes, to which the exponent is
// added.
inline constexpr int kMxfp4FoldedRange = 26;
inline constexpr std::uint32_t kMxfp4Magnitudes = 0x77777777U;  // of 8 codes
inline constexpr std::uint32_t kByteSigns = 0x80808080U;
/// What a sum of products with these numbers is too large by, 2^13, where it is times the factor of
/// the matrix.
inline constexpr float kMxfp4Unfolded = 0x1p-13F;
/// The scale of which codes are what they mean.
inline constexpr std::uint32_t kMxfp4ScaleOfOne = kMxfp4LargestScale - kMxfp4FoldedRange / 2;
/// The table of a scale byte: magnitudes 0, 0.5, 1 and 1.5, then 2, 3, 4 and 6.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t mxfp4_lower(std::uint32_t scale) {
  constexpr std::uint32_t kStep = 0x04040400U;
  return scale * kStep + (0x3e3c3800U - kMxfp4ScaleOfOne * kStep);
}
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t mxfp4_upper(std::uint32_t scale) {
  constexpr std::uint32_t kStep = 0x04040404U;
  return scale * kStep + (0x46444240U - kMxfp4ScaleOfOne * kStep);
}

/// The word of 8 codes (4 bits each, column 0 in the lowest four bits of `codes`).
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t mxfp4_word(std::uint32_t codes) {
  std::uint32_t word = 0;
  for (int column = 0; column < 8; ++column) {
    word |= (codes >> (4 * column) & 15U) << mxfp4_at(column);
  }
  return word;
}

/// Pair i of a word of MXFP4 as bf16 numbers, 2^126 too small.
template <int kPair>
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t mxfp4_pair(std::uint32_t word) {
  constexpr int kUp = kMxfp4At - 4 * kPair;
  const std::uint32_t signs = (word << (12 - 4 * kPair)) & kSigns;
  if constexpr (kUp < 0) {
    return ((word >> -kUp) & kMxfp4Mask) | signs;
  } else {
    return ((word << kUp) & kMxfp4Mask) | signs;
  }
}

/// Two codes of e4m3, in the upper byte of each half of `wide`, as bf16 numbers, 2^120 too small.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t e4m3_pair(std::uint32_t wide) {
  return ((wide >> (8 - kE4M3At)) & kE4M3Mask) | (wide & kSigns);
}

/// From the first code of a step to the lane's 8.
SWITCHYARD_HOST_DEVICE constexpr int e4m3_place(int row, int eight) {
  return eight / 2 * 16 * kGroupRows + row * 16 + eight % 2 * 8;
}

/// Whose 8 columns of MXFP4 are, and of which step of a unit: a lane has 16 that follow each other,
/// so that its two words have one scale, in a last unit of half the columns 8.
struct Mxfp4Place {
  int lane = 0;  // t
  int step = 0;
};
/// @param column  A multiple of 8.
SWITCHYARD_HOST_DEVICE constexpr Mxfp4Place mxfp4_place(std::int64_t cols, std::int64_t column) {
  const auto here = static_cast<int>(column % kUnitValues);
  const bool whole = column - here + kUnitValues <= cols;
  return whole ? Mxfp4Place{here / 16, here % 16 / 8} : Mxfp4Place{here / 8, 0};
}

/// Where 8 codes of a row begin in a matrix of so many columns: a word of MXFP4, 8 bytes of e4m3.
/// `column` is a multiple of 8.
SWITCHYARD_HOST_DEVICE constexpr std::int64_t place_of(WeightFormat format, std::int64_t cols,
                                                       std::int64_t row, std::int64_t column) {
  const std::int64_t unit = row / kGroupRows * units_of(cols) + column / kUnitValues;
  const auto here = static_cast<int>(row % kGroupRows);
  if (format == WeightFormat::kMxfp4) {
    const Mxfp4Place at = mxfp4_place(cols, column);
    return unit * kMxfp4UnitBytes + (here * 4 + at.lane) * 8 + at.step * 4;
  }
  const std::int64_t step = column % kUnitValues / kStepValues;
  const auto eight = static_cast<int>(column % kStepValues / 8);
  return unit * kE4M3UnitBytes + step * kE4M3StepBytes + e4m3_place(here, eight);
}

/// Where the scale of 32 columns of a row of MXFP4 lies, that of lanes 0 and 1 or of 2 and 3. In a
/// last unit of half the columns it lies there twice.
SWITCHYARD_HOST_DEVICE constexpr std::int64_t scale_place_of(std::int64_t cols, std::int64_t row,
                                                             std::int64_t column) {
  const std::int64_t unit = row / kGroupRows * units_of(cols) + column / kUnitValues;
  return unit * kMxfp4UnitBytes + kMxfp4ScalesAt + row % kGroupRows * 2 +
         column % kUnitValues / kStepValues;
}

/// The order of a lane's codes of e4m3, for rows that are multiplied by them: of each 32 values the
/// 16 pairs of neighbours are dealt out to four runs of 16 bytes, so that a row goes to where wgmma
/// reads it by tensor copies. Run q has pair q of the four of each lane t, which owns values 8t to
/// 8t + 7; lanes 2 and 3 take their last two pairs first: their words lie in the banks of lanes 0
/// and 1, so a warp reads the first words of some beside the last of the others.
inline constexpr int kOrderedValues = kStepValues;
inline constexpr int kSplitValues = 128;
/// Whether tokens and intermediate rows can lie so.
SWITCHYARD_HOST_DEVICE constexpr bool can_be_ordered(std::int64_t hidden, std::int64_t inner) {
  return hidden % kOrderedValues == 0 && inner % kOrderedValues == 0;
}
/// The run that pair i of four of lane t goes to, and the pair that run i has of lane t.
SWITCHYARD_HOST_DEVICE constexpr int ordered_run(int t, int i) { return t >= 2 ? i ^ 2 : i; }
/// From the 8 codes of e4m3 of lane t to the word of them that it reads first; the other is the
/// last.
SWITCHYARD_HOST_DEVICE constexpr int e4m3_first_word(int t) { return t / 2 * 4; }
/// Where value `column` of a row lies then.
SWITCHYARD_HOST_DEVICE constexpr std::int64_t ordered_column(std::int64_t column) {
  const auto here = static_cast<int>(column % kOrderedValues);
  const int t = here / 8;
  return column - here + 8 * ordered_run(t, here / 2 % 4) + 2 * t + here % 2;
}

/// Where the first of the two numbers of value `column` lies in a split row of so many columns
/// (MXFP4): of every 128 values, or of those that are left, the first numbers, then the second
/// ones. 32 are those of a step, the even ones of a lane's 8 columns its operands 4t to 4t + 3 of a
/// product, the odd ones those 16 behind.
SWITCHYARD_HOST_DEVICE constexpr std::int64_t split_byte(std::int64_t cols, std::int64_t column) {
  const Mxfp4Place at = mxfp4_place(cols, column / 8 * 8);
  const auto unit = static_cast<int>(column % kSplitValues / kUnitValues);
  return column / kSplitValues * (2 * kSplitValues) + unit * kUnitValues + at.step * kStepValues +
         column % 2 * 16 + at.lane * 4 + column % 8 / 2;
}
/// From it to the second one.
SWITCHYARD_HOST_DEVICE constexpr std::int64_t to_second_byte(std::int64_t cols,
                                                             std::int64_t column) {
  const std::int64_t left = cols - column / kSplitValues * kSplitValues;
  return left < kSplitValues ? left : kSplitValues;
}

}  // namespace switchyard::coded
