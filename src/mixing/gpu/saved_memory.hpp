#pragma once

#include <array>

#include "core/check.hpp"
#include "core/gpu/device_buffer.hpp"
#include "mixing/saved_soft_moe.hpp"

namespace switchyard::mixing {

/// Of forwards on a GPU.
class DeviceMixingMemory final : public SavedMixingMemory {
 public:
  explicit DeviceMixingMemory(int device) : device_(device) {}

  /// Makes `memory` that of the current device where it is something else's or none.
  static void prepare(std::unique_ptr<SavedMixingMemory>& memory, cudaStream_t stream) {
    int device = 0;
    SWITCHYARD_CUDA(cudaGetDevice(&device));
    auto* mine = dynamic_cast<DeviceMixingMemory*>(memory.get());
    if (mine == nullptr || mine->device_ != device) {
      auto fresh = std::make_unique<DeviceMixingMemory>(device);
      mine = fresh.get();
      memory = std::move(fresh);
    }
    mine->stream_ = stream;
  }

  [[nodiscard]] std::byte* reserve(Part part, std::int64_t bytes) override {
    DeviceBuffer& buffer = parts_[part];
    if (bytes > buffer.bytes()) {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      SWITCHYARD_CUDA(cudaStreamIsCapturing(stream_, &capture));
      require(capture == cudaStreamCaptureStatusNone,
              "what Soft-MoE saves needs memory, which is not to be had while a stream is "
              "captured: make such a call with it before");
    }
    return buffer.reserve(bytes);
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  std::array<DeviceBuffer, kParts> parts_;
};

}  // namespace switchyard::mixing
