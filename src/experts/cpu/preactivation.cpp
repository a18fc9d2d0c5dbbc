#include "experts/cpu/preactivation.hpp"

#include <algorithm>
#include <cstring>

#include "core/cpu/memory.hpp"
#include "core/row_ops.hpp"

namespace switchyard::cpu {

void store_preactivation(const StorePreactivationArgs& args) {
  const CpuExpertWeights& weights = *args.weights;
  const std::int64_t inner = weights.config().inner;
  const std::int64_t width = weights.kernels().panel_cols;
  const std::int64_t per_half = weights.first_cols();
  const std::int64_t first = args.panel * per_half;
  const std::int64_t cols = std::min(per_half, inner - first);
  const float* bias = weights.first_bias(args.expert, args.panel);
  const std::int64_t element = size_of(args.out.dtype);
  constexpr std::int64_t kRowsAhead = 8;  // that are fetched into the cache
  constexpr std::int64_t kVector = 16;    // floats of AVX-512
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const std::byte* const ahead =
        args.out.row(std::min(r + kRowsAhead, args.rows - 1)) + first * element;
    fetch_lines(ahead, cols * element);
    if (width > per_half) fetch_lines(ahead + inner * element, cols * element);
    for (std::int64_t half = 0; half < width / per_half; ++half) {
      const float* values = args.product + r * width + half * per_half;
      constexpr std::int64_t kMost = 64;
      float sums[kMost];
      if (bias != nullptr) {
        for (std::int64_t i = 0; i < cols; ++i) sums[i] = values[i] + bias[half * per_half + i];
        values = sums;
      }
      std::byte* const out = args.out.row(r) + (half * inner + first) * element;
      if (args.out.dtype == DType::kF32 && cols == kVector) {  // a move, not a call
        std::memcpy(out, values, kVector * sizeof(float));
      } else {
        row_ops::narrow(args.out.dtype, values, out, cols);
      }
    }
  }
}

}  // namespace switchyard::cpu
