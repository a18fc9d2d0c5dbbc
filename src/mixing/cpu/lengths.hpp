#pragma once

#include <cstdint>

namespace switchyard::mixing {

/// out = row / sqrt(sum of squares + kSoftMoeEpsilon) of `n` values; sums in double.
void normalize_row(const float* row, std::int64_t n, float* out);

/// The way back: from g, the gradient of the normalised row, to that of the row, in place:
/// r (g - y <y, g>) with r = 1 / sqrt(sum of squares + kSoftMoeEpsilon), y = r row.
void normalize_row_backward(const float* row, std::int64_t n, float* g);

}  // namespace switchyard::mixing
