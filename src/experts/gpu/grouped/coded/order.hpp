#pragma once

// Rows in the order in which codes of e4m3 lie.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace switchyard {

struct OrderedRows {
  const void* x = nullptr;                  ///< [N, C], bf16.
  std::int64_t num_tokens = 0;              ///< N.
  const std::int32_t* row_token = nullptr;  ///< [S] row of x for each row, < 0: none; null: itself.
  const std::int32_t* end = nullptr;        ///< Rows from this one on are left out.
  std::int64_t max_rows = 0;                ///< S.
  std::int64_t columns = 0;                 ///< C, a multiple of 32.
  void* out = nullptr;                      ///< [S, C], bf16, apart from x.
};

/// Row r of out = row `row_token[r]` of x, value c at coded::ordered_column(c). Arrays lie
/// on the device, rows 16-byte aligned. Enqueues one kernel; capturable.
/// @throws Error{kInvalidArgument}: C is no multiple of 32. {kDevice}.
/// Cost: out is written once; x is read once from memory, the rest from the L2.
void launch_order_rows(const OrderedRows& rows, cudaStream_t stream);

}  // namespace switchyard
