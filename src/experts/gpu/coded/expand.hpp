#pragma once

// Codes as rows of bf16, for products that take such.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "switchyard/weight_format.hpp"

namespace switchyard::coded {

/// Matrices of one shape that follow each other, each as pack() leaves it; every pointer lives on
/// the device, 16-byte aligned.
struct ExpandParams {
  WeightFormat format = WeightFormat::kMxfp4;
  Int4Form int4{};                   ///< Of kInt4.
  const std::byte* codes = nullptr;  ///< [matrices], bytes_of() each.
  const float* scales = nullptr;     ///< [matrices], floats_of() each; int4 has none.
  void* rows = nullptr;              ///< out [matrices, rows, cols] bf16.
  /// [matrices / of_expert] rows of x that an expert has: the matrices of one with none are left
  /// out, and their room as it is. Null: all are written.
  const std::int32_t* expert_rows = nullptr;
  std::int32_t of_expert = 1;  ///< Matrices of an expert, behind each other.
  std::int64_t matrices = 0;   ///< Up to 65535.
  std::int64_t num_rows = 0;   ///< A multiple of 8.
  std::int64_t cols = 0;       ///< A multiple of 8, and (e4m3 apart) of the values that share a
                               ///< scale.
};

/// What decode() makes of them in bf16, bit for bit. Enqueues one kernel; capturable.
/// @throws Error{kDevice}.
/// Cost: bound by memory, 2.5 to 3 bytes a weight.
void launch_expand(const ExpandParams& params, cudaStream_t stream);

}  // namespace switchyard::coded
