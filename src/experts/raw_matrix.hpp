#pragma once

#include <cstddef>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// The same memory, as matrices whose type is known at run time.
[[nodiscard]] inline RawMatrix raw(Matrix<float> matrix) {
  return {reinterpret_cast<std::byte*>(matrix.data), DType::kF32, matrix.shape[0], matrix.shape[1]};
}

[[nodiscard]] inline ConstRawMatrix raw(Matrix<const float> matrix) {
  return {reinterpret_cast<const std::byte*>(matrix.data), DType::kF32, matrix.shape[0],
          matrix.shape[1]};
}

}  // namespace switchyard
