// A pool that hands out indices of one loop at a time from a shared counter.
#include "switchyard/thread_pool.hpp"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/check.hpp"

namespace switchyard {

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable start;
  std::condition_variable finish;
  const std::function<void(std::int64_t, int)>* body = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};
  std::uint64_t loop = 0;  // which loop is running; workers wait for it to change
  int busy = 0;
  bool stop = false;
  std::exception_ptr error;
  std::vector<std::thread> workers;

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
    for (;;) {
      {
        std::unique_lock lock(mutex);
        start.wait(lock, [&] { return stop || loop != done; });
        if (stop) return;
        done = loop;
      }
      drain(worker);
      const std::lock_guard lock(mutex);
      if (--busy == 0) finish.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  require(num_threads >= 1 && num_threads <= 4096, "number of threads is {}, want 1 to 4096",
          num_threads);
  for (int worker = 1; worker < num_threads; ++worker) {
    state_->workers.emplace_back([this, worker] { state_->work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->start.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

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
    state.busy = static_cast<int>(state.workers.size());
    state.error = nullptr;
    ++state.loop;
  }
  state.start.notify_all();
  state.drain(0);
  std::unique_lock lock(state.mutex);
  state.finish.wait(lock, [&] { return state.busy == 0; });
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
