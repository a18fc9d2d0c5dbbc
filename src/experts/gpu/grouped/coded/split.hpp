#pragma once

// Rows of bf16 as tensor cores for e4m3 take them, without loss: each value is the sum of two.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace switchyard {

struct SplitRows {
  const void* x = nullptr;                  ///< [N, C], bf16.
  std::int64_t num_tokens = 0;              ///< N.
  const std::int32_t* row_token = nullptr;  ///< [S] row of x for each row, < 0: none; null: itself.
  const std::int32_t* end = nullptr;        ///< Rows from this one on are left out.
  std::int64_t max_rows = 0;                ///< S.
  std::int64_t columns = 0;                 ///< C, a multiple of 32.
  void* out = nullptr;  ///< [S, C], 2 bytes a value, 16-byte aligned; x itself or apart from it.
  float* scales = nullptr;  ///< [S]: what the numbers in `out` are times, a power of two.
  bool overlaps = false;    ///< With the end of the kernel before it, which writes x.
};

/// Row r of out = row `row_token[r]` of x as two numbers of e4m3 for each value, whose sum times
/// `scales[r]` it is: the nearest and, of what is left, the nearest again. 8 bits are 4 and 4, so
/// that is exact for values within 2^9 of the row's largest; smaller ones are off by 2^-17 of the
/// largest at most, of 2880 values no more than 2^-11 of their root mean square. Of
/// every 32 values come the 32 first numbers, that of column c at coded::split_byte(c), then the 32
/// others. A row with an infinite value has ones of its sign there, zeros elsewhere, and an
/// infinite scale; NaN stays.
/// Enqueues one kernel; capturable.
/// @throws Error{kInvalidArgument}: C is no multiple of 32; {kDevice}.
/// Cost: x is read from memory, out written once.
void launch_split_rows(const SplitRows& rows, cudaStream_t stream);

}  // namespace switchyard
