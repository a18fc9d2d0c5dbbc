#pragma once

// Combine of tokens with at most two rows, by bulk copies: when it is the faster one, and how it is
// called.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// What the choice depends on.
struct PairProblem {
  std::int64_t num_tokens = 0;
  std::int64_t rows_per_token = 0;  ///< At most.
  std::int64_t row_bytes = 0;
  DType in = DType::kF32;
  DType out = DType::kF32;
  bool each_group = false;
  bool hopper = false;
};

/// Long rows of the type of the sums, and several for each warp of the chip.
[[nodiscard]] bool takes_pairs(const PairProblem& problem);

struct PairParams {
  static constexpr int kMaxGroups = 64;
  const std::byte* rows;             // [rows, row_bytes]
  std::byte* sums;                   // [N, row_bytes]
  const std::int32_t* expert_begin;  // [El+1]
  const float* row_weight;           // [rows]
  const std::int32_t* token_begin;   // [N+1]
  const std::int32_t* token_row;     // [2N]
  std::int32_t num_tokens, row_bytes;
  std::int32_t pieces, piece_bytes;  // of a row: set by the launch
  std::int32_t num_groups, width;
  std::int32_t border[kMaxGroups];  // local expert at which group g + 1 begins
};

void launch_combine_pairs(PairParams params, DType dtype, cudaStream_t stream);

}  // namespace switchyard
