#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace switchyard {

/// A fixed set of threads for loops over independent work. One caller at a time. Which thread takes
/// which index depends on timing, so an index must write only what no other index writes: then the
/// results do not depend on the number of threads.
class ThreadPool {
 public:
  /// @param num_threads  Threads that work on a loop, the caller included; >= 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const noexcept;

  /// Calls body(index, worker) for each index in [0, count), worker in [0, num_threads), and
  /// returns when all are done. Indices are handed out in ascending order. The first exception
  /// thrown by the body is rethrown here after all threads have stopped.
  void parallel_for(std::int64_t count, const std::function<void(std::int64_t, int)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The same on `pool`, or in the calling thread (as worker 0) where `pool` is null.
void parallel_for(ThreadPool* pool, std::int64_t count,
                  const std::function<void(std::int64_t, int)>& body);

/// Threads of `pool`, 1 for null.
[[nodiscard]] int num_threads(const ThreadPool* pool) noexcept;

}  // namespace switchyard
