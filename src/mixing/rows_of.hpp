#pragma once

#include "switchyard/tensor.hpp"

namespace switchyard::mixing {

/// Rows [first, first + count) of a matrix.
[[nodiscard]] inline ConstRawMatrix rows_of(ConstRawMatrix all, std::int64_t first,
                                            std::int64_t count) {
  return {all.data + first * all.row_bytes(), all.dtype, count, all.cols};
}
[[nodiscard]] inline RawMatrix rows_of(RawMatrix all, std::int64_t first, std::int64_t count) {
  return {all.data + first * all.row_bytes(), all.dtype, count, all.cols};
}
template <typename T>
[[nodiscard]] Matrix<T> rows_of(Matrix<T> all, std::int64_t first, std::int64_t count) {
  return {all.data + first * all.shape[1], {count, all.shape[1]}};
}

}  // namespace switchyard::mixing
