#pragma once

// Stored matrices as they lie on a GPU, and back as numbers; on the host. e4m3 and MXFP4 are in
// units (coded/layout.hpp); int4 and NVFP4 are as StoredLayout has them, all values of a matrix and
// then all of its scales.

#include <cstdint>

#include "switchyard/weight_format.hpp"

namespace switchyard::coded {

/// Bytes of a matrix, a multiple of 16.
std::int64_t bytes_of(const StoredLayout& layout);
/// f32 of a matrix that lie apart: the scales of e4m3's blocks, a factor of MXFP4 and NVFP4, none
/// of int4.
std::int64_t floats_of(const StoredLayout& layout);

/// What pack() says of a matrix.
struct Packed {
  /// MXFP4: that of the matrix's sums, 2^(s - 127) of its largest scale s, of blocks that are not
  /// all zeros. NVFP4: that of its scales, `stored.factor`. Else 1; e4m3's scales stay where they
  /// are.
  float factor = 1;
  /// Whether scales of MXFP4 are at most kMxfp4FoldedRange powers of two apart.
  bool folds = false;
};

/// A whole matrix, as StoredLayout says, into bytes_of() of zeros at `out`.
/// @throws Error{kInvalidArgument}: a code of e4m3 or a scale is NaN or infinite, by row and
///         column; NVFP4's factor is. {kUnsupported}: scales of MXFP4 that are more than
///         kMxfp4MostRange powers of two apart.
Packed pack(const StoredLayout& layout, ConstStoredRows stored, std::byte* out);

/// Rows [first_row, first_row + num_rows) of a matrix in units, of `cols` columns, as the numbers
/// that they mean, in f32: code times scale, where `factor` is what pack() returned and `scales`
/// are those of e4m3's blocks, [., ceil(cols / 128)]. `packed`: the group of 8 rows that has
/// first_row. (Those that lie as they are stored are decode()'s.)
void unpack(WeightFormat format, std::int64_t cols, const std::byte* packed, float factor,
            const float* scales, std::int64_t first_row, std::int64_t num_rows, float* out);

}  // namespace switchyard::coded
