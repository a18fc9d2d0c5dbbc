#pragma once

// One loop over the threads of whatever runtime, and what such a runtime is.

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace switchyard::threads {

using Body = std::function<void(std::int64_t, int)>;

/// The calling thread's floating-point mode: rounding, and whether denormals are zeros. Threads of
/// others may be in another one, which must not show in results.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : bits_(_mm_getcsr()) {}
  void enter() const { _mm_setcsr(bits_); }

 private:
  unsigned bits_;
#else
  void enter() const {}
#endif
};

/// Indices of one loop, handed out from a counter. Lives in the frame of the caller.
class Loop {
 public:
  Loop(std::int64_t count, const Body& body) : body_(body), count_(count) {}

  /// Takes indices until there are none.
  void drain(int worker) {
    const FloatMode before;
    mode_.enter();
    for (;;) {
      const std::int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= count_) break;
      try {
        body_(index, worker);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
        next_.store(count_, std::memory_order_relaxed);  // nobody starts another index
      }
    }
    before.enter();
  }

  /// After all threads have drained it, in the caller.
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const Body& body_;
  std::int64_t count_;
  FloatMode mode_;
  std::atomic<std::int64_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

/// Threads that run loops.
class Runtime {
 public:
  Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  virtual ~Runtime() = default;
  /// Has `loop` drained by the caller as worker 0 and perhaps others, each by its number below that
  /// of the threads; returns when all have. What was written before is seen by all of them, and
  /// what they write by the caller afterwards.
  virtual void run(Loop& loop) = 0;
};

/// Starts num_threads - 1 threads.
/// @throws Error{kOutOfMemory}.
[[nodiscard]] std::unique_ptr<Runtime> start_own_threads(int num_threads);

/// An OpenMP runtime that is loaded in this process, whoever brought it.
struct OpenMp {
  using Region = void (*)(void*);
  /// Runs the region on a team of that many threads (0: max_threads()), the caller in it.
  void (*parallel)(Region region, void* data, unsigned num_threads, unsigned flags) = nullptr;
  int (*max_threads)() = nullptr;  ///< omp_get_max_threads()
  int (*thread_num)() = nullptr;   ///< omp_get_thread_num()
  int (*in_parallel)() = nullptr;  ///< omp_in_parallel()
  bool of_torch = false;           ///< torch runs its operations on it.
  std::string file;
};

/// The one that torch uses where torch is loaded; null: none is loaded now.
[[nodiscard]] const OpenMp* find_openmp();

/// Runs loops on `openmp`, which outlives it.
[[nodiscard]] std::unique_ptr<Runtime> use_openmp(const OpenMp& openmp, int num_threads);

}  // namespace switchyard::threads
