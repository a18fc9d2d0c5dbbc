#pragma once

#include <cstddef>
#include <deque>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "switchyard/execution.hpp"

#ifdef SWITCHYARD_WITH_CUDA
#include "testkit/gpu/device_array.hpp"
#endif

namespace switchyard {

/// Where the arrays of a call lie: in the vectors that hold them, or, for a GPU, in copies on the
/// current one.
class CallMemory {
 public:
  explicit CallMemory(Backend backend) : copies_(backend == Backend::kCuda) { make_stream(); }
  ~CallMemory() { end_stream(); }
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  /// Of a GPU's calls, of its own: ranks may share the GPU. Null on a CPU.
  [[nodiscard]] void* stream() const { return stream_; }

#ifdef SWITCHYARD_WITH_CUDA
  /// The place of `array`, with what is in it; null of none. `array` stays until finish().
  [[nodiscard]] std::byte* place(std::vector<std::byte>& array) {
    if (array.empty() || !copies_) return array.empty() ? nullptr : array.data();
    const auto& [_, copy] = list_.emplace_back(std::piecewise_construct, std::tuple(&array),
                                               std::forward_as_tuple(array));
    return copy.as<std::byte>();
  }
  /// Waits for the device; all arrays have what their places have.
  void finish() {
    if (!copies_) return;
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    for (const auto& [array, copy] : list_) {
      *array = copy_out<std::byte>(copy.data(), std::ssize(*array), nullptr);
    }
  }

 private:
  void make_stream() {
    if (!copies_) return;
    cudaStream_t stream = nullptr;
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_ = stream;
  }
  void end_stream() const {
    if (stream_ != nullptr) cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
  }

  bool copies_;
  void* stream_ = nullptr;
  std::deque<std::pair<std::vector<std::byte>*, DeviceBytes>> list_;
#else
  [[nodiscard]] std::byte* place(std::vector<std::byte>& array) const {
    require(!copies_, "this build has no backend cuda");
    return array.empty() ? nullptr : array.data();
  }
  void finish() const {}

 private:
  void make_stream() {}
  void end_stream() const {}

  bool copies_;
  void* stream_ = nullptr;
#endif
};

}  // namespace switchyard
