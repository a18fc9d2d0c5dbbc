#include "mixing/cpu/lengths.hpp"

#include <cmath>

#include "switchyard/routing/soft_moe.hpp"

namespace switchyard::mixing {
namespace {

double dot(const float* a, const float* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

double inverse_length(const float* row, std::int64_t n) {
  return 1.0 / std::sqrt(dot(row, row, n) + double{kSoftMoeEpsilon});
}

}  // namespace

void normalize_row(const float* row, std::int64_t n, float* out) {
  const auto factor = static_cast<float>(inverse_length(row, n));
  for (std::int64_t i = 0; i < n; ++i) out[i] = row[i] * factor;
}

void normalize_row_backward(const float* row, std::int64_t n, float* g) {
  const double factor = inverse_length(row, n);
  const auto along = static_cast<float>(factor * factor * dot(row, g, n));
  const auto scale = static_cast<float>(factor);
  for (std::int64_t i = 0; i < n; ++i) g[i] = scale * (g[i] - row[i] * along);
}

}  // namespace switchyard::mixing
