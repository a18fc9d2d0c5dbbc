#include "models/cpu/cross_entropy.hpp"

#include <algorithm>
#include <cmath>

#include "core/cpu/vector_loops.hpp"

namespace switchyard::models {
namespace {

using cpu::kLanes;

SWITCHYARD_INLINE inline float largest_of(const float* x, std::int64_t n) {
  float most[kLanes];
  for (std::int64_t j = 0; j < kLanes; ++j) most[j] = x[0];
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
  }
  for (; i < n; ++i) most[0] = x[i] > most[0] ? x[i] : most[0];
  return *std::max_element(most, most + kLanes);
}

/// x into e^(x - most). Returns the sum, in chains of 16 that are added in double.
SWITCHYARD_INLINE inline double exponentials(float* x, std::int64_t n, float most) {
  float sum[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) {
      x[i + j] = cpu::exp_of(x[i + j] - most);
      sum[j] += x[i + j];
    }
  }
  double all = 0;
  for (; i < n; ++i) {
    x[i] = cpu::exp_of(x[i] - most);
    all += double{x[i]};
  }
  for (const float part : sum) all += double{part};
  return all;
}

void run_row(const CrossEntropyArgs& args, std::int64_t row) {
  float* const x = args.logits + row * args.vocabulary;
  const std::int32_t target = args.targets[row];
  args.nll[row] = 0;
  if (target < 0) {
    if (args.backward) std::fill_n(x, args.vocabulary, 0.0F);
    return;
  }
  const double at_target = x[target];
  cpu::vectorized([&]() SWITCHYARD_INLINE {
    const float most = largest_of(x, args.vocabulary);
    const double sum = exponentials(x, args.vocabulary, most);
    args.nll[row] = std::log(sum) + double{most} - at_target;
    if (!args.backward) return;
    const auto factor = static_cast<float>(double{args.scale} / sum);
    for (std::int64_t v = 0; v < args.vocabulary; ++v) x[v] *= factor;
    x[target] -= args.scale;
  });
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& args) {
  constexpr std::int64_t kRows = 16;
  parallel_for(args.pool, (args.rows + kRows - 1) / kRows, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(args.rows, (task + 1) * kRows);
    for (std::int64_t row = task * kRows; row < end; ++row) run_row(args, row);
  });
}

}  // namespace switchyard::models
