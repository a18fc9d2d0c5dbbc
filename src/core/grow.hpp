#pragma once

#include <exception>
#include <vector>

#include "core/check.hpp"

namespace switchyard {

/// Room for `size` elements; what was there is lost where it grows, and never there twice.
/// @throws Error{kOutOfMemory} that says how much was asked for.
template <typename T>
void grow(std::vector<T>& values, std::size_t size) {
  if (size <= values.size()) return;
  try {
    std::vector<T>().swap(values);
    values.resize(size);
  } catch (const std::exception&) {  // bad_alloc, or length_error
    fail(ErrorCode::kOutOfMemory, "cannot allocate {} elements of {} bytes of host memory", size,
         sizeof(T));
  }
}

}  // namespace switchyard
