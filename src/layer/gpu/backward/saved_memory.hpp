#pragma once

#include <array>

#include "core/check.hpp"
#include "core/gpu/device_buffer.hpp"
#include "layer/saved_forward.hpp"

namespace switchyard {

/// Of a layer on a GPU.
class DeviceSavedMemory final : public SavedMemory {
 public:
  explicit DeviceSavedMemory(int device) : device_(device) {}

  /// What `memory` has of the current device, made where it is something else's or none.
  static DeviceSavedMemory& prepare(std::unique_ptr<SavedMemory>& memory, cudaStream_t stream) {
    int device = 0;
    SWITCHYARD_CUDA(cudaGetDevice(&device));
    auto* mine = dynamic_cast<DeviceSavedMemory*>(memory.get());
    if (mine == nullptr || mine->device_ != device) {
      auto fresh = std::make_unique<DeviceSavedMemory>(device);
      mine = fresh.get();
      memory = std::move(fresh);
    }
    mine->stream_ = stream;
    return *mine;
  }

  /// Of what reserve() then makes nothing.
  [[nodiscard]] bool has(Part part, std::int64_t bytes) const {
    return parts_[part].bytes() >= bytes;
  }
  [[nodiscard]] std::byte* reserve(Part part, std::int64_t bytes) override {
    DeviceBuffer& buffer = parts_[part];
    if (bytes > buffer.bytes()) {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      SWITCHYARD_CUDA(cudaStreamIsCapturing(stream_, &capture));
      require(capture == cudaStreamCaptureStatusNone,
              "a saved forward needs memory, which is not to be had while a stream is captured: "
              "make such a forward with it before");
    }
    return buffer.reserve(bytes);
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  std::array<DeviceBuffer, kParts> parts_;
};

}  // namespace switchyard
