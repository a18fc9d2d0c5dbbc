#pragma once

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

}  // namespace switchyard
