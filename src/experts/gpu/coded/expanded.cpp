#include "experts/gpu/coded/expanded.hpp"

#include <algorithm>

#include "experts/gpu/coded/expand.hpp"
#include "experts/gpu/coded/pack.hpp"

namespace switchyard::coded {
namespace {

constexpr std::int64_t kExpandedBytes = std::int64_t{64} << 20;
constexpr std::int64_t kNumberBytes = 2;

/// Matrices [first, first + count) of those that begin at `codes` and `floats`.
ExpandParams matrices_of(const CodedWeights& weights, const std::byte* codes, const float* floats,
                         std::int64_t rows, std::int64_t cols, std::int64_t first,
                         std::int64_t count) {
  const StoredLayout layout{
      .format = weights.format, .rows = rows, .cols = cols, .int4 = weights.int4};
  return {.format = weights.format,
          .int4 = weights.int4,
          .codes = codes + first * bytes_of(layout),
          .scales = floats + first * floats_of(layout),
          .matrices = count,
          .num_rows = rows,
          .cols = cols};
}

/// Experts [first, first + count).
void launch_some(const CodedWeights& weights, GroupedGemmParams params, std::int32_t first,
                 std::int32_t count, std::byte* numbers, cudaStream_t stream) {
  const std::int64_t parts = params.gated ? 2 : 1;
  const std::int64_t hidden = params.hidden;
  const std::int64_t inner = params.inner;
  std::byte* const w2 = numbers + count * parts * hidden * inner * kNumberBytes;
  ExpandParams up = matrices_of(weights, weights.w13, weights.scales13, inner, hidden,
                                first * parts, count * parts);
  ExpandParams down =
      matrices_of(weights, weights.w2, weights.scales2, hidden, inner, first, count);
  up.of_expert = static_cast<std::int32_t>(parts);
  up.expert_rows = down.expert_rows = params.expert_rows + first;
  up.rows = numbers;
  down.rows = w2;
  launch_expand(up, stream);
  launch_expand(down, stream);
  params.expected_rows = expected_rows(params.max_rows, count, params.num_experts);
  params.w13 = numbers;
  params.w2 = w2;
  if (params.b13 != nullptr) params.b13 += first * parts * inner;
  if (params.b2 != nullptr) params.b2 += first * hidden;
  params.expert_begin += first;
  params.expert_rows += first;
  params.num_experts = count;
  launch_gate_up(params, stream);
  launch_down(params, stream);
}

}  // namespace

std::int64_t expanded_expert_bytes(std::int64_t hidden, std::int64_t inner, bool gated) {
  return (gated ? 3 : 2) * hidden * inner * kNumberBytes;
}

std::int32_t expanded_experts(std::int64_t hidden, std::int64_t inner, bool gated,
                              std::int32_t num_experts) {
  const std::int64_t fit = kExpandedBytes / expanded_expert_bytes(hidden, inner, gated);
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(std::max<std::int64_t>(1, fit), num_experts));
}

std::int64_t expected_rows(std::int64_t max_rows, std::int32_t count, std::int32_t num_experts) {
  return std::max<std::int64_t>(1, max_rows * count / num_experts);
}

void launch_expanded(const CodedWeights& weights, const GroupedGemmParams& params,
                     std::byte* numbers, cudaStream_t stream) {
  const std::int32_t at_once =
      expanded_experts(params.hidden, params.inner, params.gated, params.num_experts);
  for (std::int32_t first = 0; first < params.num_experts; first += at_once) {
    launch_some(weights, params, first, std::min(at_once, params.num_experts - first), numbers,
                stream);
  }
}

}  // namespace switchyard::coded
