// Bound by the exponentials, and by reading logits: tasks are blocks of columns, or rows.
#include "mixing/cpu/softmaxes.hpp"

#include <algorithm>
#include <bit>
#include <limits>

namespace switchyard::mixing {
namespace {

constexpr std::int64_t kColumns = 64;  ///< Of a task: sums of columns stay in registers and L1.
constexpr std::int64_t kRowsPerTask = 16;

/// e^x for x <= 0, to 2 ulp; below -87 that of -87. Plain arithmetic, so that loops of it become
/// vectors of whatever the build has; a NaN stays a NaN.
inline float exp_of_negative(float x) {
  constexpr float kRound = 0x1.8p23F;  // adding it leaves the whole number in the lowest bits
  x = x < -87.0F ? -87.0F : x;
  const float shifted = x * 1.44269504F + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts: n * 0.693359375 is exact.
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  // (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2]: the experts' polynomial.
  float p = 0.00019909646F;
  p = p * r + 0.0013946446F;
  p = p * r + 0.0083332807F;
  p = p * r + 0.041666262F;
  p = p * r + 0.16666667F;
  p = p * r + 0.5F;
  const float value = (p * r * r + r) + 1.0F;
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(shifted) << 23;
  return value * std::bit_cast<float>(exponent + (std::uint32_t{127} << 23));
}

template <typename Body>
void for_columns(ThreadPool* pool, std::int64_t columns, const Body& body) {
  parallel_for(pool, (columns + kColumns - 1) / kColumns, [&](std::int64_t task, int) {
    body(task * kColumns, std::min(kColumns, columns - task * kColumns));
  });
}

template <typename Body>
void for_rows(ThreadPool* pool, std::int64_t rows, const Body& body) {
  parallel_for(pool, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::int64_t row = task * kRowsPerTask; row < end; ++row) body(row);
  });
}

/// Sixteen partial sums in lanes, then over the lanes: an order of its own, whatever the vectors.
template <typename Term>
float sum_in_lanes(std::int64_t count, const Term& term) {
  constexpr std::int64_t kLanes = 16;
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  for (; i < count; ++i) sum += term(i);
  return sum;
}

}  // namespace

void softmax_over_tokens(const SoftmaxArgs& args) {
  const std::int64_t num_tokens = args.logits.shape[0];
  for_columns(args.pool, args.logits.shape[1], [&](std::int64_t first, std::int64_t count) {
    float largest[kColumns];
    float sums[kColumns] = {};
    std::fill_n(largest, kColumns, -std::numeric_limits<float>::infinity());
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const float* u = args.logits.row(t) + first;
      for (std::int64_t s = 0; s < count; ++s) largest[s] = std::max(largest[s], args.scale * u[s]);
    }
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const float* u = args.logits.row(t) + first;
      float* out = args.weights.row(t) + first;
      for (std::int64_t s = 0; s < count; ++s) {
        out[s] = exp_of_negative(args.scale * u[s] - largest[s]);
        sums[s] += out[s];
      }
    }
    for (std::int64_t s = 0; s < count; ++s) sums[s] = 1.0F / sums[s];
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      float* out = args.weights.row(t) + first;
      for (std::int64_t s = 0; s < count; ++s) out[s] *= sums[s];
    }
  });
}

void softmax_over_slots(const SoftmaxArgs& args) {
  const std::int64_t slots = args.logits.shape[1];
  for_rows(args.pool, args.logits.shape[0], [&](std::int64_t t) {
    const float* u = args.logits.row(t);
    float* out = args.weights.row(t);
    float largest = args.scale * u[0];
    for (std::int64_t s = 1; s < slots; ++s) largest = std::max(largest, args.scale * u[s]);
    for (std::int64_t s = 0; s < slots; ++s) {
      out[s] = exp_of_negative(args.scale * u[s] - largest);
    }
    const float factor = 1.0F / sum_in_lanes(slots, [&](std::int64_t s) { return out[s]; });
    for (std::int64_t s = 0; s < slots; ++s) out[s] *= factor;
  });
}

void softmax_over_tokens_backward(const SoftmaxGradientArgs& args) {
  const std::int64_t num_tokens = args.weights.shape[0];
  for_columns(args.pool, args.weights.shape[1], [&](std::int64_t first, std::int64_t count) {
    float dots[kColumns] = {};
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const float* weight = args.weights.row(t) + first;
      const float* gradient = args.gradient.row(t) + first;
      for (std::int64_t s = 0; s < count; ++s) dots[s] += weight[s] * gradient[s];
    }
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const float* weight = args.weights.row(t) + first;
      const float* gradient = args.gradient.row(t) + first;
      float* out = args.dlogits.row(t) + first;
      for (std::int64_t s = 0; s < count; ++s) out[s] += weight[s] * (gradient[s] - dots[s]);
    }
  });
}

void softmax_over_slots_backward(const SoftmaxGradientArgs& args) {
  const std::int64_t slots = args.weights.shape[1];
  for_rows(args.pool, args.weights.shape[0], [&](std::int64_t t) {
    const float* weight = args.weights.row(t);
    const float* gradient = args.gradient.row(t);
    float* out = args.dlogits.row(t);
    const float dot = sum_in_lanes(slots, [&](std::int64_t s) { return weight[s] * gradient[s]; });
    for (std::int64_t s = 0; s < slots; ++s) out[s] += weight[s] * (gradient[s] - dot);
  });
}

}  // namespace switchyard::mixing
