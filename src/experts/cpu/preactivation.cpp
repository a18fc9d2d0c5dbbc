#include "experts/cpu/preactivation.hpp"

#include <algorithm>

#include "core/cpu/memory.hpp"
#include "core/row_ops.hpp"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kRowsAhead = 8;  ///< That are fetched into the cache.

}  // namespace

void store_preactivation(const StorePreactivationArgs& args) {
  const CpuExpertWeights& weights = *args.weights;
  const std::int64_t inner = weights.config().inner;
  const std::int64_t width = weights.kernels().panel_cols;
  const std::int64_t per_half = weights.first_cols();
  const std::int64_t first = args.panel * per_half;
  const std::int64_t all_cols = std::min(args.panels * per_half, inner - first);
  const std::int64_t element = size_of(args.out.dtype);
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const std::byte* const ahead =
        args.out.row(std::min(r + kRowsAhead, args.rows - 1)) + first * element;
    fetch_lines(ahead, all_cols * element);
    if (width > per_half) fetch_lines(ahead + inner * element, all_cols * element);
    for (std::int64_t half = 0; half < width / per_half; ++half) {
      std::byte* out = args.out.row(r) + (half * inner + first) * element;
      for (std::int64_t p = 0; p < args.panels; ++p, out += per_half * element) {
        const float* values = args.product + (p * args.places + r) * width + half * per_half;
        const std::int64_t cols = std::min(per_half, all_cols - p * per_half);
        const float* bias = weights.first_bias(args.expert, args.panel + p);
        constexpr std::int64_t kMost = 64;
        float sums[kMost];
        if (bias != nullptr) {
          for (std::int64_t i = 0; i < cols; ++i) sums[i] = values[i] + bias[half * per_half + i];
          values = sums;
        }
        if (args.out.dtype == DType::kF32) {
          copy_bytes(reinterpret_cast<const std::byte*>(values), cols * element, out);
        } else {
          row_ops::narrow(args.out.dtype, values, out, cols);
        }
      }
    }
  }
}

}  // namespace switchyard::cpu
