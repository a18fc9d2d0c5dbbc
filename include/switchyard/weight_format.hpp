#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// What the values of an expert's matrix [rows, cols] are. Sums run along cols.
enum class WeightFormat : std::uint8_t {
  kExact,   ///< f32, bf16 or f16, without scales.
  kQ8,      ///< int8, a bf16 scale for each 32 values of a row. Made when weights are packed: rows
            ///< then enter products as 15-bit values with a scale for the same 32, multiplied in
            ///< whole numbers.
  kE4M3,    ///< e4m3, an f32 scale for each block of 128 rows x 128 columns (DeepSeek-V3).
  kMxfp4,   ///< e2m1, a power of two (e8m0) for each 32 values of a row (gpt-oss).
  kInt4,    ///< Whole numbers of 4 bits less a zero point, times a scale for each group of a row
            ///< (GPTQ, AWQ, compressed-tensors); Int4Form says which.
  kNvfp4,   ///< e2m1, an e4m3 scale for each 16 values of a row, an f32 factor for the matrix.
  kStored,  ///< Asked for: whichever of these the source has (ExpertSource::stored_format()).
};

/// "exact", "q8", "e4m3", "mxfp4", "int4", "nvfp4", "stored".
[[nodiscard]] const char* to_string(WeightFormat format) noexcept;

/// Whether matrices of this format are codes with scales, as checkpoints store them.
[[nodiscard]] constexpr bool has_codes(WeightFormat format) {
  return format == WeightFormat::kE4M3 || format == WeightFormat::kMxfp4 ||
         format == WeightFormat::kInt4 || format == WeightFormat::kNvfp4;
}
/// Whether two codes share a byte, the even column in its low half: what kernels that read one of
/// these formats read of the others, with another decoder.
[[nodiscard]] constexpr bool has_nibbles(WeightFormat format) {
  return has_codes(format) && format != WeightFormat::kE4M3;
}

/// Rows and columns of a block of kE4M3 that share a scale; values of a row of kMxfp4 and of kNvfp4
/// that do.
inline constexpr std::int64_t kE4M3Block = 128;
inline constexpr std::int64_t kMxfp4Block = 32;
inline constexpr std::int64_t kNvfp4Block = 16;

/// What kInt4 leaves open; the same for all matrices of a source.
struct Int4Form {
  std::int32_t group = 128;   ///< Values of a row that share a scale: 32, 64 or 128.
  DType scale = DType::kF16;  ///< f16 or bf16.
  bool zero_points = false;   ///< Each group has one, 0 to 15; else it is kInt4Zero.
  friend bool operator==(const Int4Form&, const Int4Form&) = default;
};
inline constexpr int kInt4Zero = 8;  ///< Symmetric weights: codes 0 to 15 are -8 to 7.

/// @throws Error{kUnsupported}: another group or type of scales, by its value.
void check(const Int4Form& form);

/// How `rows` x `cols` values of a format lie in memory: values row by row, scales row by row, each
/// without a gap. kE4M3 has a row of scales for each 128 rows, the others one for each row.
///
/// | format | a row of values            | a row of scales                                   |
/// |--------|----------------------------|---------------------------------------------------|
/// | kExact | [cols] of `dtype`          | none                                              |
/// | kE4M3  | [cols], a byte each        | f32 [ceil(cols/128)]                              |
/// | kMxfp4 | [cols/2] bytes, two a byte | e8m0 [cols/32], a byte each                       |
/// | kInt4  | as kMxfp4                  | `int4.scale` [cols/group]; with zero points, then |
/// |        |                            | [ceil(cols/group/2)] bytes, two a byte            |
/// | kNvfp4 | as kMxfp4                  | e4m3 [cols/16], a byte each                       |
///
/// Of two in a byte the even column, or group, is in the low half.
/// Blocks of kE4M3 are cut off at the last row and the last column; elsewhere cols is a multiple of
/// the values that share a scale. Rows of scales of kInt4 may be an odd number of bytes: nothing in
/// them is aligned.
///
/// | format | a value, in f32                                                    |
/// |--------|--------------------------------------------------------------------|
/// | kE4M3  | code * scale                                                       |
/// | kMxfp4 | code * 2^(scale - 127), exact                                      |
/// | kInt4  | (code - zero point) * scale, exact where scales are normal numbers |
/// | kNvfp4 | code * (scale * factor), each product rounded to f32               |
struct StoredLayout {
  WeightFormat format = WeightFormat::kExact;
  DType dtype = DType::kF32;  ///< Of kExact.
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  Int4Form int4{};  ///< Of kInt4.

  [[nodiscard]] std::int64_t value_row_bytes() const;
  [[nodiscard]] std::int64_t value_bytes() const { return rows * value_row_bytes(); }
  [[nodiscard]] std::int64_t scale_rows() const;       ///< 0: no scales.
  [[nodiscard]] std::int64_t scale_row_bytes() const;  ///< 0: no scales.
  [[nodiscard]] std::int64_t scale_bytes() const { return scale_rows() * scale_row_bytes(); }
};

/// Where they lie. Scales may be null where there are none.
template <typename Byte>
struct BasicStoredRows {
  Byte* values = nullptr;
  Byte* scales = nullptr;
  float factor = 1;  ///< Of kNvfp4: of all scales of the matrix (ExpertSource::stored_factor()).
  constexpr operator BasicStoredRows<const Byte>() const
      requires(!std::is_const_v<Byte>) {  // NOLINT
    return {values, scales, factor};
  }
};
using StoredRows = BasicStoredRows<std::byte>;
using ConstStoredRows = BasicStoredRows<const std::byte>;

/// The numbers [rows, cols] that stored rows mean: the value in f32, rounded once to `dtype`
/// (f32, bf16 or f16; to nearest even). Exact for kMxfp4 in f32, and in bf16 but for scales below
/// 2^-132; for kInt4 in f32.
/// @throws Error{kUnsupported}: kQ8, which nobody stores; kStored, which names no format.
void decode(const StoredLayout& layout, ConstStoredRows stored, DType dtype, void* out);

}  // namespace switchyard
