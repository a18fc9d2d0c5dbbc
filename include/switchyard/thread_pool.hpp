#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace switchyard {

/// Whose threads a pool's loops run on.
enum class ThreadRuntime : std::uint8_t {
  kAuto,    ///< What SWITCHYARD_THREAD_RUNTIME names, else OpenMP's where the process has them.
  kOwn,     ///< Threads that the pool starts.
  kOpenMp,  ///< Those of the OpenMP runtime that is loaded: torch's, or the program's.
};

/// "auto", "own", "openmp".
[[nodiscard]] const char* to_string(ThreadRuntime runtime) noexcept;

/// Threads for loops over independent work. One caller at a time. Which thread takes which index
/// depends on timing, so an index must write only what no other index writes: then the results do
/// not depend on the number of threads. Every index is computed in the caller's floating-point mode
/// (rounding, denormals).
///
/// Two sets of threads that wait actively take each other's cores. So a pool runs on the OpenMP
/// threads that the process already has, if it has: those that torch's operations run on, or
/// `#pragma omp parallel`. A loop inside of a parallel region of OpenMP runs in the calling thread.
/// In a child of fork() a pool starts threads of its own at the next loop.
class ThreadPool {
 public:
  /// @param num_threads  Threads that work on a loop, the caller included, at most 4096; 0: as many
  ///        as OpenMP has for the calling thread (omp_get_max_threads()), 1 without OpenMP.
  /// @throws Error{kUnsupported}: kOpenMp, and no OpenMP runtime is loaded. {kInvalidArgument}: the
  ///         number, or SWITCHYARD_THREAD_RUNTIME. {kOutOfMemory}: a thread cannot be started.
  explicit ThreadPool(int num_threads, ThreadRuntime runtime = ThreadRuntime::kAuto);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const noexcept;

  /// kOwn or kOpenMp.
  [[nodiscard]] ThreadRuntime runtime() const noexcept;
  /// The same in words, with the file of the OpenMP runtime.
  [[nodiscard]] std::string description() const;

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
