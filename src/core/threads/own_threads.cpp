// Threads that take one loop at a time. A layer is a chain of short loops, so threads that wait for
// the next one look for it for a while before they sleep: a sleep and its end take longer than many
// a loop.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/check.hpp"
#include "core/threads/loop.hpp"

namespace switchyard::threads {
namespace {

/// Whether `condition` came true within some 50 us of looking. It does not yield: on a busy machine
/// each yield gives away a whole time slice, while who sleeps is woken at once.
template <class Condition>
bool spin_until(const Condition& condition) {
  constexpr auto kPatience = std::chrono::microseconds(50);
  constexpr int kLooks = 64;
  if (condition()) return true;
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int look = 0; look < kLooks; ++look) {
#if defined(__x86_64__)
      _mm_pause();
#endif
      if (condition()) return true;
    }
  } while (std::chrono::steady_clock::now() - start < kPatience);
  return condition();
}

class OwnThreads final : public Runtime {
 public:
  explicit OwnThreads(int num_threads) {
    try {
      for (int worker = 1; worker < num_threads; ++worker) {
        workers_.emplace_back([this, worker] { work(worker); });
      }
    } catch (const std::system_error& error) {
      const std::size_t started = workers_.size();
      stop();
      fail(ErrorCode::kOutOfMemory, "cannot start thread {} of {}: {}", started + 1, num_threads,
           error.what());
    }
  }
  OwnThreads(const OwnThreads&) = delete;
  OwnThreads& operator=(const OwnThreads&) = delete;
  ~OwnThreads() override { stop(); }

  void run(Loop& loop) override {
    {
      const std::lock_guard lock(mutex_);
      loop_ = &loop;
      busy_.store(static_cast<int>(workers_.size()));
      turn_.fetch_add(1);
    }
    start_.notify_all();
    loop.drain(0);
    const auto finished = [&] { return busy_.load() == 0; };
    if (!spin_until(finished)) {
      std::unique_lock lock(mutex_);
      finish_.wait(lock, finished);
    }
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_.store(true);
    }
    start_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  void work(int worker) {
    std::uint64_t done = 0;
    const auto called = [&] { return stop_.load() || turn_.load() != done; };
    for (;;) {
      if (!spin_until(called)) {
        std::unique_lock lock(mutex_);
        start_.wait(lock, called);
      }
      if (stop_.load()) return;
      done = turn_.load();
      loop_->drain(worker);
      if (busy_.fetch_sub(1) == 1) {
        const std::lock_guard lock(mutex_);  // or the caller could begin to wait after the notice
        finish_.notify_one();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable finish_;
  Loop* loop_ = nullptr;
  std::atomic<std::uint64_t> turn_{0};  // which loop is running; workers wait for it to change
  std::atomic<int> busy_{0};            // workers that have not finished it
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Runtime> start_own_threads(int num_threads) {
  return std::make_unique<OwnThreads>(num_threads);
}

}  // namespace switchyard::threads
