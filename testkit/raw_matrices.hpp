#pragma once

// A test's numbers as the library's stages take matrices.

#include <cstddef>
#include <vector>

#include "experts/raw_matrix.hpp"

namespace switchyard::test {

/// [values / cols, cols] f32.
inline RawMatrix raw_of(std::vector<float>& values, std::int64_t cols) {
  return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, std::ssize(values) / cols,
          cols};
}
inline ConstRawMatrix raw_of(const std::vector<float>& values, std::int64_t cols) {
  return {reinterpret_cast<const std::byte*>(values.data()), DType::kF32, std::ssize(values) / cols,
          cols};
}

}  // namespace switchyard::test
