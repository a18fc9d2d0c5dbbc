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
  kStored,  ///< Asked for: whichever of the two the source has (ExpertSource::stored_format()).
};

/// "exact", "q8", "e4m3", "mxfp4", "stored".
[[nodiscard]] const char* to_string(WeightFormat format) noexcept;

/// Rows and columns of a block of kE4M3 that share a scale, and values of a row of kMxfp4 that do.
inline constexpr std::int64_t kE4M3Block = 128;
inline constexpr std::int64_t kMxfp4Block = 32;

/// How `rows` x `cols` values of a format lie in memory: values row by row, scales row by row, each
/// without a gap.
///
/// | format | values                                                   | scales | | kExact | [rows,
/// cols] of `dtype`                                  | none                         | | kE4M3  |
/// [rows, cols], a byte each                                | f32 [ceil(rows/128),         | | | |
/// ceil(cols/128)]         | | kMxfp4 | [rows, cols/2], two a byte, the even column in its low half
/// | a byte [rows, cols/32]    |
///
/// Blocks of kE4M3 are cut off at the last row and the last column; cols of kMxfp4 is a multiple of
/// 32. A value is code times scale.
struct StoredLayout {
  WeightFormat format = WeightFormat::kExact;
  DType dtype = DType::kF32;  ///< Of kExact.
  std::int64_t rows = 0;
  std::int64_t cols = 0;

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
  constexpr operator BasicStoredRows<const Byte>() const
      requires(!std::is_const_v<Byte>) {  // NOLINT
    return {values, scales};
  }
};
using StoredRows = BasicStoredRows<std::byte>;
using ConstStoredRows = BasicStoredRows<const std::byte>;

/// The numbers [rows, cols] that stored rows mean: the product in f32, rounded once to `dtype`
/// (f32, bf16 or f16; to nearest even). Exact for kMxfp4 in f32, and in bf16 but for scales below
/// 2^-132.
/// @throws Error{kUnsupported}: kQ8, which nobody stores; kStored, which names no format.
void decode(const StoredLayout& layout, ConstStoredRows stored, DType dtype, void* out);

}  // namespace switchyard
