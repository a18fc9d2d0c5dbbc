#pragma once

// Codes as rows of bf16, for products that take such.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "switchyard/weight_format.hpp"

namespace switchyard::coded {

/// Matrices of one shape that follow each other, as coded/layout.hpp has them; every pointer lives
/// on the device, 16-byte aligned.
struct ExpandParams {
  WeightFormat format = WeightFormat::kMxfp4;
  const std::byte* codes = nullptr;  ///< [matrices], matrix_bytes() each.
  const float* scales = nullptr;     ///< MXFP4: [matrices]. e4m3: [matrices, block_scales()].
  void* rows = nullptr;              ///< out [matrices, rows, cols] bf16.
  std::int64_t matrices = 0;
  std::int64_t num_rows = 0;  ///< A multiple of 8.
  std::int64_t cols = 0;      ///< A multiple of 8; MXFP4: of 32.
};

/// What decode() makes of them in bf16, bit for bit. Enqueues one kernel; capturable.
/// @throws Error{kDevice}.
/// Cost: bound by memory, 2.5 (MXFP4) or 3 bytes a weight.
void launch_expand(const ExpandParams& params, cudaStream_t stream);

}  // namespace switchyard::coded
