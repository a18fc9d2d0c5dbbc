#pragma once

// Memory on a GPU of what calls leave for later ones.

#include <array>
#include <memory>
#include <utility>

#include "core/check.hpp"
#include "core/gpu/device_buffer.hpp"

namespace switchyard {

/// Pieces of memory on one device, which only grow. `Base` names them (Part, kParts), says whose
/// they are (kWhose) and is what knows no device.
template <typename Base>
class SavedOnDevice final : public Base {
 public:
  using Part = typename Base::Part;

  explicit SavedOnDevice(int device) : device_(device) {}

  /// What `memory` has of the current device, made where it is something else's or none.
  static SavedOnDevice& prepare(std::unique_ptr<Base>& memory, cudaStream_t stream) {
    int device = 0;
    SWITCHYARD_CUDA(cudaGetDevice(&device));
    auto* mine = dynamic_cast<SavedOnDevice*>(memory.get());
    if (mine == nullptr || mine->device_ != device) {
      auto fresh = std::make_unique<SavedOnDevice>(device);
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
              "{} needs memory, which is not to be had while a stream is captured: make such a "
              "forward with it before",
              Base::kWhose);
    }
    return buffer.reserve(bytes);
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  std::array<DeviceBuffer, Base::kParts> parts_;
};

}  // namespace switchyard
