#pragma once

// How much device memory the library holds in this process, now and at most.

#include <atomic>
#include <cstdint>

namespace switchyard {

/// Of all GPUs of the process and all of its threads; memory of NCCL, CUDA and the driver is not in
/// it. Every place that asks CUDA for memory says so here.
class DeviceMemoryCount {
 public:
  /// Bytes that have been taken, or given back where negative.
  static void add(std::int64_t bytes) noexcept {
    const std::int64_t now = now_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    std::int64_t most = most_.load(std::memory_order_relaxed);
    while (now > most && !most_.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }
  [[nodiscard]] static std::int64_t now() noexcept { return now_.load(std::memory_order_relaxed); }
  /// Since the process began, or since forget_most().
  [[nodiscard]] static std::int64_t most() noexcept {
    return most_.load(std::memory_order_relaxed);
  }
  static void forget_most() noexcept { most_.store(now(), std::memory_order_relaxed); }

 private:
  inline static std::atomic<std::int64_t> now_{0};
  inline static std::atomic<std::int64_t> most_{0};
};

}  // namespace switchyard
