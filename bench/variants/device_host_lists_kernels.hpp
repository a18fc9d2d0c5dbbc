#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// Row i of `to` is row index[i] of `from`; rows are multiples of 16 bytes, aligned to them.
void gather_rows(const std::byte* from, const std::int32_t* index, std::byte* to,
                 std::int64_t count, std::int64_t row_bytes, cudaStream_t stream);

struct WeightedRows {
  const std::byte* rows = nullptr;      ///< In the type of `out`.
  const std::int32_t* index = nullptr;  ///< [T, K] a row, or -1.
  const float* weight = nullptr;        ///< [T, K].
  std::int32_t top_k = 0;
  RawMatrix out{};  ///< [T, H], H a multiple of 8.
};
/// out[t] = sum over k of weight * row in fp32, ascending k, rounded once.
void sum_weighted_rows(const WeightedRows& args, cudaStream_t stream);

}  // namespace switchyard
