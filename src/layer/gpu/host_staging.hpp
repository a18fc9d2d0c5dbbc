#pragma once

#include <cstring>
#include <vector>

#include "core/check.hpp"
#include "core/gpu/device_buffer.hpp"

namespace switchyard {

/// Pinned memory between a caller's and the device's: copies from and to it are only enqueued.
/// Those from and to memory that is not pinned may hold a lock of the driver until they are done,
/// and so keep other ranks' threads from launching what they wait for.
class HostStaging {
 public:
  /// Room for so many bytes in one call, pieces of up to 256 bytes more each. Waits for the device.
  explicit HostStaging(std::size_t bytes) : size_(bytes) { memory_.reserve(bytes); }

  /// A new call: no copy of the last one is under way any more.
  void begin() {
    used_ = 0;
    pending_.clear();
  }
  /// The same bytes, pinned.
  [[nodiscard]] const void* keep(const void* from, std::size_t bytes) {
    void* const to = take(bytes);
    std::memcpy(to, from, bytes);
    return to;
  }
  /// Enqueues a copy from the device; finish() puts it to `to`.
  void download(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
    void* const via = take(bytes);
    SWITCHYARD_CUDA(cudaMemcpyAsync(via, from, bytes, cudaMemcpyDeviceToHost, stream));
    pending_.push_back({to, via, bytes});
  }
  /// Of all downloads, once their stream has been waited for.
  void finish() {
    for (const Pending& copy : pending_) std::memcpy(copy.to, copy.from, copy.bytes);
    pending_.clear();
  }
  [[nodiscard]] bool used() const { return used_ > 0; }

 private:
  struct Pending {
    void* to;
    const void* from;
    std::size_t bytes;
  };

  void* take(std::size_t bytes) {
    require(used_ + bytes <= size_, "host memory for {} bytes was made, a call wants {}", size_,
            used_ + bytes);
    void* const piece = memory_.data() + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }

  static constexpr std::size_t kAlignment = 256;
  PinnedBytes memory_;
  std::size_t size_;
  std::size_t used_ = 0;
  std::vector<Pending> pending_;
};

}  // namespace switchyard
