#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard::bench {

/// The experts' stand-in on a GPU: row i of out = (row x_row[i] of x) * factor, in their type, for
/// the rows that are used; the others are left as they are. Bound by memory.
struct StandIn {
  ConstRawMatrix x{};
  const std::int32_t* x_row = nullptr;        ///< Null: row i.
  const std::int32_t* rows = nullptr;         ///< [1] how many are used, or
  const std::int64_t* rows_64 = nullptr;      ///< the same, or
  const std::int32_t* bucket_rows = nullptr;  ///< [rows / capacity] how many of each bucket.
  std::int64_t capacity = 0;
  RawMatrix out{};
  float factor = 1;
};
void launch_stand_in(const StandIn& params, cudaStream_t stream);

}  // namespace switchyard::bench
