#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/grow.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// Host memory that is kept from call to call, only grows, and is handed out as matrices. A matrix
/// is valid until the next call on the same buffer.
class RawBuffer {
 public:
  [[nodiscard]] RawMatrix matrix(DType dtype, std::int64_t rows, std::int64_t cols) {
    grow(bytes_, static_cast<std::size_t>(rows * cols * size_of(dtype)));
    return {bytes_.data(), dtype, rows, cols};
  }

 private:
  std::vector<std::byte> bytes_;
};

/// The same for elements whose type is known.
template <typename T>
class ArrayBuffer {
 public:
  [[nodiscard]] Matrix<T> matrix(std::int64_t rows, std::int64_t cols) {
    grow(values_, static_cast<std::size_t>(rows * cols));
    return {values_.data(), {rows, cols}};
  }
  [[nodiscard]] Vector<T> vector(std::int64_t size) { return {matrix(size, 1).data, {size}}; }
  [[nodiscard]] const std::vector<T>& values() const { return values_; }

 private:
  std::vector<T> values_;
};

}  // namespace switchyard
