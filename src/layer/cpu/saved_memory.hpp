#pragma once

#include <algorithm>
#include <array>

#include "layer/cpu/buffers.hpp"
#include "layer/saved_forward.hpp"

namespace switchyard {

/// Of a layer on the CPU.
class HostSavedMemory final : public SavedMemory {
 public:
  /// What `memory` has of it, made where it is something else's or none.
  static void prepare(std::unique_ptr<SavedMemory>& memory) {
    if (dynamic_cast<HostSavedMemory*>(memory.get()) != nullptr) return;
    memory = std::make_unique<HostSavedMemory>();
  }
  [[nodiscard]] std::byte* reserve(Part part, std::int64_t bytes) override {
    return parts_[part].matrix(DType::kF8E4M3, bytes, 1).data;
  }

 private:
  std::array<RawBuffer, kParts> parts_;
};

/// A copy of `values` as a part of `saved`, which is on the CPU.
template <typename T>
Matrix<T> keep(SavedForward::State& saved, SavedMemory::Part part, Matrix<const T> values) {
  const Matrix<T> copy = saved.room<T>(part, values.shape[0], values.shape[1]);
  std::copy_n(values.data, values.size(), copy.data);
  return copy;
}

}  // namespace switchyard
