#pragma once

// Rows in the order in which codes lie.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace switchyard {

/// out [N, C] bf16: the values of x [N, C], value c of a row at coded::ordered_column(c). C is a
/// multiple of 32; both are 16-byte aligned and apart. Enqueues one kernel; capturable.
/// @throws Error{kInvalidArgument}: C is no multiple of 32. {kDevice}.
/// Cost: both are crossed once.
void launch_order_rows(const void* x, std::int64_t rows, std::int64_t columns, void* out,
                       cudaStream_t stream);

}  // namespace switchyard
