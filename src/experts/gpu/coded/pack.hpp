#pragma once

// Stored rows as coded/layout.hpp has them, and back as numbers; on the host.

#include <cstdint>

#include "switchyard/weight_format.hpp"

namespace switchyard::coded {

/// A whole matrix, as StoredLayout says, into matrix_bytes() of zeros at `out`.
/// MXFP4: returns the factor of the matrix's sums, 2^(s - 127) of its largest scale s, of blocks
/// that are not all zeros. e4m3: returns 1; the scales stay where they are.
/// @throws Error{kInvalidArgument}: a code of e4m3 or a scale of MXFP4 is NaN, by row and column.
///         {kUnsupported}: scales of MXFP4 that are more than kMxfp4MostRange powers of two apart.
float pack(const StoredLayout& layout, ConstStoredRows stored, std::byte* out);

/// Rows [first_row, first_row + num_rows) of a packed matrix of `cols` columns as the numbers that
/// they mean, in f32: code times scale, where `factor` is what pack() returned and `scales` are
/// those of e4m3's blocks, [., ceil(cols / 128)]. `packed`: the group of 8 rows that has first_row.
void unpack(WeightFormat format, std::int64_t cols, const std::byte* packed, float factor,
            const float* scales, std::int64_t first_row, std::int64_t num_rows, float* out);

}  // namespace switchyard::coded
