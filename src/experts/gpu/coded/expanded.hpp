#pragma once

// Both products of experts whose weights are codes, for many rows: some experts at a time become
// bf16 rows, then the grouped products run on these.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "experts/gpu/grouped/gemm.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard::coded {

/// The matrices of GroupedGemmParams::w13 and w2 as pack() leaves them, and the f32 that lie apart.
struct CodedWeights {
  WeightFormat format = WeightFormat::kMxfp4;
  Int4Form int4{};  ///< Of kInt4.
  const std::byte* w13 = nullptr;
  const float* scales13 = nullptr;
  const std::byte* w2 = nullptr;
  const float* scales2 = nullptr;
};

/// Bytes of an expert's weights as bf16 numbers.
[[nodiscard]] std::int64_t expanded_expert_bytes(std::int64_t hidden, std::int64_t inner,
                                                 bool gated);
/// Experts that become numbers at a time: at least one, and no more than 64 MiB of them.
[[nodiscard]] std::int32_t expanded_experts(std::int64_t hidden, std::int64_t inner, bool gated,
                                            std::int32_t num_experts);

/// Rows that `count` of all experts have together, about: what their tiles are chosen by.
[[nodiscard]] std::int64_t expected_rows(std::int64_t max_rows, std::int32_t count,
                                         std::int32_t num_experts);

/// launch_gate_up() and launch_down() of `params` (of bf16), whose w13 and w2 do not count. Weights
/// go through `numbers`: expanded_experts() times expanded_expert_bytes(), 16-byte aligned.
/// Enqueues four kernels for each of these experts together; capturable; no host wait.
/// @throws as launch_gate_up().
/// Cost: reads the codes of the experts that have rows, writes their numbers, reads them again.
void launch_expanded(const CodedWeights& weights, const GroupedGemmParams& params,
                     std::byte* numbers, cudaStream_t stream);

}  // namespace switchyard::coded
