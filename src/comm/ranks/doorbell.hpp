#pragma once

// Waiting for something that another thread will make true, with a deadline: look for some 20 us (a
// partner that runs at the same time answers within a microsecond), then sleep. It does not yield:
// on a busy machine each yield gives away a whole time slice, while who sleeps is woken at once.

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "comm/ranks/deadline.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
    constexpr int kLooks = 400;
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      _mm_pause();
#endif
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
