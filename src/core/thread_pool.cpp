// A pool that hands out indices of one loop at a time from a shared counter. A layer is a chain of
// short loops, so threads that wait for the next one look for it for a while before they sleep: a
// sleep and its end take longer than many a loop.
#include "switchyard/thread_pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/check.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace switchyard {
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

}  // namespace

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable start;
  std::condition_variable finish;
  const std::function<void(std::int64_t, int)>* body = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::uint64_t> loop{0};  // which loop is running; workers wait for it to change
  std::atomic<int> busy{0};            // workers that have not finished it
  std::atomic<bool> stop{false};
  std::exception_ptr error;
  std::vector<std::thread> workers;

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  /// Also where the constructor of the pool could start only some of its threads.
  ~State() {
    {
      const std::lock_guard lock(mutex);
      stop.store(true);
    }
    start.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void drain(int worker) {
    try {
      for (;;) {
        const std::int64_t index = next.fetch_add(1, std::memory_order_relaxed);
        if (index >= count) return;
        (*body)(index, worker);
      }
    } catch (...) {
      next.store(count, std::memory_order_relaxed);  // nobody starts another index
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  }

  void work(int worker) {
    std::uint64_t done = 0;
    const auto called = [&] { return stop.load() || loop.load() != done; };
    for (;;) {
      if (!spin_until(called)) {
        std::unique_lock lock(mutex);
        start.wait(lock, called);
      }
      if (stop.load()) return;
      done = loop.load();
      drain(worker);
      if (busy.fetch_sub(1) == 1) {
        const std::lock_guard lock(mutex);  // or the caller could begin to wait after the notice
        finish.notify_one();
      }
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  require(num_threads >= 1 && num_threads <= 4096, "number of threads is {}, want 1 to 4096",
          num_threads);
  try {
    for (int worker = 1; worker < num_threads; ++worker) {
      state_->workers.emplace_back([state = state_.get(), worker] { state->work(worker); });
    }
  } catch (const std::system_error& error) {
    fail(ErrorCode::kOutOfMemory, "cannot start thread {} of {}: {}", state_->workers.size() + 1,
         num_threads, error.what());
  }
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const noexcept {
  return static_cast<int>(state_->workers.size()) + 1;
}

void ThreadPool::parallel_for(std::int64_t count,
                              const std::function<void(std::int64_t, int)>& body) {
  if (count <= 0) return;
  State& state = *state_;
  if (state.workers.empty() || count == 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  {
    const std::lock_guard lock(state.mutex);
    state.body = &body;
    state.count = count;
    state.next.store(0, std::memory_order_relaxed);
    state.busy.store(static_cast<int>(state.workers.size()));
    state.error = nullptr;
    state.loop.fetch_add(1);
  }
  state.start.notify_all();
  state.drain(0);
  const auto finished = [&] { return state.busy.load() == 0; };
  if (!spin_until(finished)) {
    std::unique_lock lock(state.mutex);
    state.finish.wait(lock, finished);
  }
  state.body = nullptr;
  if (state.error) std::rethrow_exception(state.error);
}

void parallel_for(ThreadPool* pool, std::int64_t count,
                  const std::function<void(std::int64_t, int)>& body) {
  if (pool != nullptr) {
    pool->parallel_for(count, body);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) body(i, 0);
}

int num_threads(const ThreadPool* pool) noexcept {
  return pool == nullptr ? 1 : pool->num_threads();
}

}  // namespace switchyard
