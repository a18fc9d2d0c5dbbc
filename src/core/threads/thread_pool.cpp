// Which threads a pool's loops run on.
#include "switchyard/thread_pool.hpp"

#include <fmt/core.h>
#include <pthread.h>

#include <utility>

#include "core/check.hpp"
#include "core/environment.hpp"
#include "core/say.hpp"
#include "core/threads/loop.hpp"
#include "switchyard/names.hpp"

namespace switchyard {
namespace {

/// How often this process has come out of fork(), from when a first pool was made. A child has none
/// of its parent's threads, neither ours nor OpenMP's.
unsigned times_forked() {
  static std::atomic<unsigned> times{0};
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { times.fetch_add(1); });
  return times.load(std::memory_order_relaxed);
}

/// What `asked` comes to here: own threads, or OpenMP's (null: own).
const threads::OpenMp* choose(ThreadRuntime asked) {
  if (asked == ThreadRuntime::kAuto) {
    const char* const name = value_of(Variable::kThreadRuntime);
    if (name != nullptr && *name != '\0') {
      const auto named = parse<ThreadRuntime>(name);
      require(named.has_value(), "SWITCHYARD_THREAD_RUNTIME={}, want auto, own or openmp", name);
      asked = *named;
    }
  }
  if (asked == ThreadRuntime::kOwn) return nullptr;
  const threads::OpenMp* const openmp = threads::find_openmp();
  if (asked == ThreadRuntime::kAuto && times_forked() != 0) return nullptr;
  if (asked == ThreadRuntime::kOpenMp && openmp == nullptr) {
    fail(ErrorCode::kUnsupported, "no OpenMP runtime is loaded in this process");
  }
  return openmp;
}

}  // namespace

struct ThreadPool::State {
  int num_threads = 1;
  unsigned made_after = times_forked();
  const threads::OpenMp* openmp = nullptr;
  std::unique_ptr<threads::Runtime> runtime;  ///< Null with one thread.

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { leave_to_parent(); }

  /// After a fork, what the parent's threads and locks were: not to be touched, not even freed.
  bool leave_to_parent() {
    const unsigned now = times_forked();
    if (std::exchange(made_after, now) == now) return false;
    (void)runtime.release();
    return true;
  }
};

ThreadPool::ThreadPool(int num_threads, ThreadRuntime runtime) : state_(std::make_unique<State>()) {
  require(num_threads >= 0 && num_threads <= 4096,
          "number of threads is {}, want 1 to 4096, or 0: OpenMP's", num_threads);
  const threads::OpenMp* const openmp = choose(runtime);
  if (num_threads == 0) num_threads = openmp == nullptr ? 1 : openmp->max_threads();
  state_->num_threads = num_threads;
  state_->openmp = openmp;
  if (num_threads == 1) return;
  state_->runtime = openmp == nullptr ? threads::start_own_threads(num_threads)
                                      : threads::use_openmp(*openmp, num_threads);
  if (is_verbose()) say(fmt::format("switchyard: {} threads, {}\n", num_threads, description()));
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const noexcept { return state_->num_threads; }

ThreadRuntime ThreadPool::runtime() const noexcept {
  return state_->openmp == nullptr ? ThreadRuntime::kOwn : ThreadRuntime::kOpenMp;
}

std::string ThreadPool::description() const {
  const threads::OpenMp* const openmp = state_->openmp;
  if (openmp == nullptr) return "its own";
  return fmt::format("OpenMP's{}: {}", openmp->of_torch ? ", as torch" : "", openmp->file);
}

void ThreadPool::parallel_for(std::int64_t count,
                              const std::function<void(std::int64_t, int)>& body) {
  State& state = *state_;
  if (state.num_threads == 1 || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  if (state.leave_to_parent()) {
    state.openmp = nullptr;
    state.runtime = threads::start_own_threads(state.num_threads);
  }
  threads::Loop loop(count, body);
  state.runtime->run(loop);
  loop.rethrow();
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
