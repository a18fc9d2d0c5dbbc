#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "comm/nccl/pairs/kernels.hpp"

namespace switchyard {

/// A send whose other side does not come would run for ever: a thread looks at the kernels' counts
/// now and then, and past the deadline gives the transfer up.
class NcclWatch {
 public:
  /// `give_up` is called once, with the lock of calls() held.
  NcclWatch(const TransferProgress* progress, std::chrono::milliseconds timeout,
            std::function<void()> give_up);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  /// Held while NCCL is called.
  [[nodiscard]] std::unique_lock<std::mutex> calls() const { return std::unique_lock(mutex_); }
  /// The direction that was given up, 0 or 1; -1: none.
  [[nodiscard]] int expired() const { return expired_; }
  /// Looks on after a transfer was given up; calls() held.
  void renew() { expired_ = -1; }

 private:
  void watch();

  const TransferProgress* progress_;
  std::chrono::milliseconds timeout_;
  std::function<void()> give_up_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool ending_ = false;
  std::atomic<int> expired_ = -1;
  std::thread thread_;
};

}  // namespace switchyard
