#pragma once

#include <cuda.h>

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// A row-major 16-bit matrix on the device, as TMA reads it: boxes of `box_rows` x 64 values, each
/// row of 128 bytes swizzled in groups of 8 rows; zeros past the edges.
struct TensorMapArgs {
  const void* data = nullptr;  ///< 16-byte aligned.
  DType dtype = DType::kBF16;  ///< kBF16 or kF16.
  std::int64_t rows = 0;
  std::int64_t cols = 0;  ///< A multiple of 8.
  std::int32_t box_rows = 0;
};

/// @throws Error{kInvalidArgument} if the driver refuses the shape, {kUnsupported} if it is too
/// old.
[[nodiscard]] CUtensorMap make_tensor_map(const TensorMapArgs& args);

}  // namespace switchyard
