// Loops on the threads of an OpenMP runtime that is in the process already. It is found at run
// time, so that nothing here links to one: a second runtime would bring a second set of threads.
// GOMP_parallel is GNU's entry of a parallel region; LLVM's and Intel's runtimes have it too.
#include <string_view>

#include "core/threads/loop.hpp"
#include "core/threads/thread_sanitizer.hpp"

#if SWITCHYARD_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif
#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>

#include <mutex>
#include <optional>
#include <vector>
#endif

namespace switchyard::threads {
namespace {

/// The begin and the end of a region order the memory of its threads. The thread sanitizer cannot
/// see that in a runtime that is not built with it, and is told.
void tell_sanitizer_of_release([[maybe_unused]] void* what) {
#if SWITCHYARD_THREAD_SANITIZER
  __tsan_release(what);
#endif
}
void tell_sanitizer_of_acquire([[maybe_unused]] void* what) {
#if SWITCHYARD_THREAD_SANITIZER
  __tsan_acquire(what);
#endif
}

class OpenMpThreads final : public Runtime {
 public:
  OpenMpThreads(const OpenMp& openmp, int num_threads)
      : openmp_(openmp), num_threads_(num_threads) {}

  void run(Loop& loop) override {
    if (openmp_.in_parallel() != 0) {  // its team has the cores
      loop.drain(0);
      return;
    }
    Call call{&openmp_, &loop, num_threads_};
    tell_sanitizer_of_release(&call);
    openmp_.parallel(enter, &call, team(), 0);
    tell_sanitizer_of_acquire(&call);
  }

 private:
  struct Call {
    const OpenMp* openmp;
    Loop* loop;
    int num_threads;
  };

  /// GNU's runtime ends and starts threads where a team is of another size than the one before. So
  /// beside torch, whose operations all take its whole number of threads, a loop takes that team
  /// too, and leaves those that are too many idle.
  [[nodiscard]] unsigned team() const {
    constexpr unsigned kAll = 0;
    if (openmp_.of_torch && num_threads_ <= openmp_.max_threads()) return kAll;
    return static_cast<unsigned>(num_threads_);
  }

  static void enter(void* data) noexcept {
    tell_sanitizer_of_acquire(data);
    const Call& call = *static_cast<const Call*>(data);
    const int worker = call.openmp->thread_num();
    if (worker < call.num_threads) call.loop->drain(worker);
    tell_sanitizer_of_release(data);
  }

  const OpenMp& openmp_;
  int num_threads_;
};

#if defined(__linux__)

/// What `handle` and what it depends on know of an OpenMP runtime.
std::optional<OpenMp> look_in(void* handle, bool of_torch) {
  OpenMp found;
  const auto take = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    return function != nullptr;
  };
  if (!take(found.parallel, "GOMP_parallel") || !take(found.max_threads, "omp_get_max_threads") ||
      !take(found.thread_num, "omp_get_thread_num") ||
      !take(found.in_parallel, "omp_in_parallel")) {
    return std::nullopt;
  }
  found.of_torch = of_torch;
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(found.parallel), &info) != 0) found.file = info.dli_fname;
  return found;
}

std::vector<std::string> loaded_files() {
  std::vector<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* out) {
        if (object->dlpi_name != nullptr && *object->dlpi_name != '\0') {
          static_cast<std::vector<std::string>*>(out)->emplace_back(object->dlpi_name);
        }
        return 0;
      },
      &files);
  return files;
}

bool is_named(std::string_view file, std::string_view begin) {
  return file.substr(file.rfind('/') + 1).starts_with(begin);
}

/// In the order in which the loader finds the functions for torch: what the whole process sees,
/// then what torch's library brought (its OpenMP has a file name of its own); without torch, any.
std::optional<OpenMp> look() {
  const std::vector<std::string> files = loaded_files();
  const auto look_in_files = [&](std::string_view begin, bool of_torch) -> std::optional<OpenMp> {
    for (const std::string& file : files) {
      if (!is_named(file, begin)) continue;
      // Never closed where something is found: the functions stay in use.
      void* const handle = dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
      if (handle == nullptr) continue;
      if (auto found = look_in(handle, of_torch)) return found;
      dlclose(handle);
    }
    return std::nullopt;
  };
  constexpr std::string_view kTorch = "libtorch_cpu.so";
  bool with_torch = false;
  for (const std::string& file : files) with_torch = with_torch || is_named(file, kTorch);
  if (auto found = look_in(RTLD_DEFAULT, with_torch)) return found;
  if (auto found = look_in_files(kTorch, true)) return found;
  for (const std::string_view begin : {"libgomp", "libomp", "libiomp5"}) {
    if (auto found = look_in_files(begin, false)) return found;
  }
  return std::nullopt;
}

#endif

}  // namespace

const OpenMp* find_openmp() {
#if defined(__linux__)
  static std::mutex mutex;
  static std::vector<std::unique_ptr<const OpenMp>> found;  // pools hold on to what they were given
  const std::lock_guard lock(mutex);
  if (!found.empty() && found.back()->of_torch) return found.back().get();
  // Again each time: torch may have come since.
  auto now = look();
  if (!now) return nullptr;
  if (found.empty() || found.back()->parallel != now->parallel ||
      found.back()->of_torch != now->of_torch) {
    found.push_back(std::make_unique<const OpenMp>(std::move(*now)));
  }
  return found.back().get();
#else
  return nullptr;
#endif
}

std::unique_ptr<Runtime> use_openmp(const OpenMp& openmp, int num_threads) {
  return std::make_unique<OpenMpThreads>(openmp, num_threads);
}

}  // namespace switchyard::threads
