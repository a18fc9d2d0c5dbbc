#pragma once

// Combine of tokens with at most two rows, by bulk copies: when it is the faster one.

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// What the choice depends on.
struct BulkProblem {
  std::int64_t num_tokens = 0;
  std::int64_t rows_per_token = 0;  ///< At most.
  std::int64_t row_bytes = 0;
  DType in = DType::kF32;
  DType out = DType::kF32;
  bool each_group = false;
  bool hopper = false;
};

/// Long rows of the type of the sums, and several for each warp of the chip.
[[nodiscard]] bool takes_bulk(const BulkProblem& problem);

}  // namespace switchyard
