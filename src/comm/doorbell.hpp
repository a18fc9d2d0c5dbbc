#pragma once

// Waiting for something that another thread will make true, with a deadline: look a few times (a
// partner that runs at the same time answers within a microsecond), then let others run, then
// sleep.

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "comm/deadline.hpp"

namespace switchyard {

class Doorbell {
 public:
  /// To be called after what the sleeper waits for has been stored (seq_cst).
  void ring() noexcept {
    if (sleepers_.load() == 0) return;
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  /// True once `ready()` is; false if it is not by the deadline. `ready` reads seq_cst atomics:
  /// either it sees a store, or the one who stores sees the sleeper.
  template <typename Ready>
  bool wait(const Ready& ready, Deadline deadline) {
    // Few looks: ranks may outnumber cores, and then the partner needs this one.
    constexpr int kLooks = 100;
    constexpr int kYields = 20;
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
    }
    for (int i = 0; i < kYields; ++i) {
      std::this_thread::yield();
      if (ready()) return true;
    }
    std::unique_lock lock(mutex_);
    ++sleepers_;
    const bool done = changed_.wait_until(lock, deadline, ready);
    --sleepers_;
    return done;
  }

 private:
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace switchyard
