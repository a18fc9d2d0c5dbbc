#pragma once

#include <cstddef>
#include <functional>

#include "core/check.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

template <typename T>
void require_shape(const char* name, const Vector<T>& v, std::int64_t size) {
  require(v.shape[0] == size && (v.data != nullptr || size == 0), "{} is [{}]{}, want [{}]", name,
          v.shape[0], v.data == nullptr ? " (null)" : "", size);
}

template <typename T>
void require_shape(const char* name, const Matrix<T>& m, std::int64_t rows, std::int64_t cols) {
  require(m.shape[0] == rows && m.shape[1] == cols && (m.data != nullptr || rows * cols == 0),
          "{} is [{}, {}]{}, want [{}, {}]", name, m.shape[0], m.shape[1],
          m.data == nullptr ? " (null)" : "", rows, cols);
}

template <typename Byte>
void require_shape(const char* name, const BasicRawMatrix<Byte>& m, std::int64_t rows,
                   std::int64_t cols) {
  require(m.rows == rows && m.cols == cols && (m.data != nullptr || rows * cols == 0),
          "{} is [{}, {}]{}, want [{}, {}]", name, m.rows, m.cols,
          m.data == nullptr ? " (null)" : "", rows, cols);
}

/// An output is written while an input may still be read.
inline void require_apart(const char* name, ConstRawMatrix out, const char* other,
                          ConstRawMatrix in) {
  const std::less<const std::byte*> before;
  require(out.bytes() == 0 || in.bytes() == 0 || !before(out.data, in.data + in.bytes()) ||
              !before(in.data, out.data + out.bytes()),
          "{} overlaps {}: it needs memory of its own", name, other);
}

/// f32, bf16 or f16: what stages compute with.
[[nodiscard]] constexpr bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

inline void require_float(const char* name, DType dtype) {
  require(is_float(dtype), "{} is {}, want f32, bf16 or f16", name, to_string(dtype));
}

}  // namespace switchyard
