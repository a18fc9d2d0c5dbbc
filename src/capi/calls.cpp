// C interface: calls from several threads, and after fork().
#include "capi/calls.hpp"

#include <pthread.h>
#include <unistd.h>

#include <utility>

#include "core/check.hpp"

namespace switchyard::capi {
namespace {

std::atomic<std::uint32_t> generation = 1;

/// How often fork() lies between this process and the one that opened the library, plus one.
std::uint32_t process_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

const char* named(StaysBehind part) {
  switch (part) {
    case StaysBehind::kRanks: return "its place among the ranks is";
    default: return "its GPU is";
  }
}

}  // namespace

void CallLock::lock() {
  const std::uint32_t here = process_generation();
  std::uint32_t holder = 0;
  while (!holder_.compare_exchange_weak(holder, here, std::memory_order_acquire)) {
    if (holder != 0 && holder != here) {
      fail(ErrorCode::kUnsupported,
           "another thread was in a call when process {} was forked: make the object again here",
           getpid());
    }
    if (holder != 0) holder_.wait(holder);
    holder = 0;
  }
}

void CallLock::unlock() noexcept {
  holder_.store(0, std::memory_order_release);
  holder_.notify_one();
}

Calls::Calls(const char* what, StaysBehind part, std::shared_ptr<CallLock> lock)
    : what_(what),
      part_(part),
      made_in_(process_generation()),
      made_by_(getpid()),
      lock_(lock ? std::move(lock) : std::make_shared<CallLock>()) {}

std::unique_lock<CallLock> Calls::begin() const {
  if (!may_free()) {
    fail(ErrorCode::kUnsupported,
         "{} was made before fork(): {} with process {}, not with this one ({}); make it here, or "
         "start processes by spawn",
         what_, named(part_), made_by_, getpid());
  }
  return std::unique_lock(*lock_);
}

bool Calls::may_free() const noexcept {
  return part_ == StaysBehind::kNothing || made_in_ == process_generation();
}

}  // namespace switchyard::capi
