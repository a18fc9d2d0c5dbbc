#pragma once

// Where the codes of stored weights lie on a GPU, so that kernels which multiply them by mma.sync
// read each lane's share with one aligned load, without a shuffle and without a bank conflict.
// int4 and NVFP4, which no such kernel reads yet, lie as they are stored (pack.hpp).
//
// A unit is 8 rows of a matrix by 64 columns, which are two steps of 32 along the sum. Lane (g, t)
// = (lane / 4, lane % 4) owns columns 8t .. 8t + 7 of each step of row g. Units of the same 8 rows
// follow each other along the sum, 8 rows follow 8 rows: what a block of a kernel streams is one
// run of memory for every 8 rows.
//
//   MXFP4: 8 bytes a lane (a word of 8 codes for each step), then the scales: 2 bytes a row. The
//   bits
//          of a word lie so that a shift and a mask give a pair of bf16 numbers that are too small
//          by a power of two.
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

/// How far left pair i of a word of MXFP4 has to go, exponents and mantissas. Below the first pair
/// are two, above it one; each of the 16 bits of half a word is somebody's.
SWITCHYARD_HOST_DEVICE constexpr int mxfp4_shift(int pair) { return pair == 3 ? -3 : 3 * pair; }
/// Their signs: pair 1's goes with its number, and bits 14 and 13 are those of pairs 2 and 3.
SWITCHYARD_HOST_DEVICE constexpr int mxfp4_sign_shift(int pair) {
  return pair < 2 ? 3 * pair : pair - 1;
}

/// The word of 8 codes (4 bits each, column 0 in the lowest four bits of `codes`).
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t mxfp4_word(std::uint32_t codes) {
  std::uint32_t word = 0;
  for (int column = 0; column < 8; ++column) {
    const std::uint32_t code = codes >> (4 * column) & 15U;
    const int pair = column / 2;
    const int half = 16 * (column % 2);
    word |= (code & 7U) << (half + kMxfp4At - mxfp4_shift(pair));
    word |= (code >> 3) << (half + 15 - mxfp4_sign_shift(pair));
  }
  return word;
}

/// Pair i of a word of MXFP4 as bf16 numbers, 2^126 too small.
template <int kPair>
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t mxfp4_pair(std::uint32_t word) {
  constexpr int kUp = mxfp4_shift(kPair);
  constexpr int kSignUp = mxfp4_sign_shift(kPair);
  if constexpr (kUp == kSignUp) {
    return (word << kUp) & (kMxfp4Mask | kSigns);
  } else if constexpr (kUp < 0) {
    return ((word >> -kUp) & kMxfp4Mask) | ((word << kSignUp) & kSigns);
  } else {
    return ((word << kUp) & kMxfp4Mask) | ((word << kSignUp) & kSigns);
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

/// Where 8 codes of a row begin in a matrix of so many columns: a word of MXFP4, 8 bytes of e4m3.
/// `column` is a multiple of 8.
SWITCHYARD_HOST_DEVICE constexpr std::int64_t place_of(WeightFormat format, std::int64_t cols,
                                                       std::int64_t row, std::int64_t column) {
  const std::int64_t unit = row / kGroupRows * units_of(cols) + column / kUnitValues;
  const std::int64_t step = column % kUnitValues / kStepValues;
  const auto here = static_cast<int>(row % kGroupRows);
  const auto eight = static_cast<int>(column % kStepValues / 8);
  return format == WeightFormat::kMxfp4
             ? unit * kMxfp4UnitBytes + (here * 4 + eight) * 8 + step * 4
             : unit * kE4M3UnitBytes + step * kE4M3StepBytes + e4m3_place(here, eight);
}

/// Where the scale of 32 columns of a row of MXFP4 lies.
SWITCHYARD_HOST_DEVICE constexpr std::int64_t scale_place_of(std::int64_t cols, std::int64_t row,
                                                             std::int64_t column) {
  const std::int64_t unit = row / kGroupRows * units_of(cols) + column / kUnitValues;
  return unit * kMxfp4UnitBytes + kMxfp4ScalesAt + row % kGroupRows * 2 +
         column % kUnitValues / kStepValues;
}

/// The order of a lane's codes, for rows that are multiplied by them: of each 32 values the 16
/// pairs of neighbours are dealt out to four runs of 16 bytes, so that a row goes to where wgmma
/// reads it by tensor copies. Run q has pair q of the four of each lane t, which owns values 8t to
/// 8t + 7; of e4m3 lanes 2 and 3 take their last two pairs first: their words lie in the banks of
/// lanes 0 and 1, so a warp reads the first words of some beside the last of the others.
inline constexpr int kOrderedValues = kStepValues;
/// Whether tokens and intermediate rows can lie so.
SWITCHYARD_HOST_DEVICE constexpr bool can_be_ordered(std::int64_t hidden, std::int64_t inner) {
  return hidden % kOrderedValues == 0 && inner % kOrderedValues == 0;
}
/// The run that pair i of four of lane t goes to, and the pair that run i has of lane t.
SWITCHYARD_HOST_DEVICE constexpr int ordered_run(WeightFormat format, int t, int i) {
  return format == WeightFormat::kE4M3 && t >= 2 ? i ^ 2 : i;
}
/// From the 8 codes of e4m3 of lane t to the word of them that it reads first; the other is the
/// last.
SWITCHYARD_HOST_DEVICE constexpr int e4m3_first_word(int t) { return t / 2 * 4; }
/// Where value `column` of a row lies then.
SWITCHYARD_HOST_DEVICE constexpr std::int64_t ordered_column(WeightFormat format,
                                                             std::int64_t column) {
  const auto here = static_cast<int>(column % kOrderedValues);
  const int t = here / 8;
  return column - here + 8 * ordered_run(format, t, here / 2 % 4) + 2 * t + here % 2;
}

}  // namespace switchyard::coded
