#pragma once

// Who may call on a handle, and when: any thread, one at a time, and after fork() the child only
// where nothing but memory and threads, which are started anew, belongs to the handle.

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace switchyard::capi {

/// A lock that knows whose it is after fork(): one that was held by another thread of the parent is
/// held by nobody in the child, which must not wait for it.
class CallLock {
 public:
  /// @throws Error{kUnsupported}: held when the process forked.
  void lock();
  void unlock() noexcept;

 private:
  std::atomic<std::uint32_t> holder_ = 0;  // generation of the process that holds it; 0: free
};

/// What of a handle does not come along when the process forks.
enum class StaysBehind { kNothing, kRanks, kGpu };

/// Calls on one handle, or on all handles of one communicator.
class Calls {
 public:
  /// @param what  "the layer", for messages.
  explicit Calls(const char* what, StaysBehind part = StaysBehind::kNothing,
                 std::shared_ptr<CallLock> lock = nullptr);

  /// For a handle that comes to need a GPU or ranks.
  void stays_behind(StaysBehind part) { part_ = part; }
  /// Waits for other threads' calls; the call lasts as long as what it returns.
  /// @throws Error{kUnsupported}: not in a child of the process that made the handle.
  [[nodiscard]] std::unique_lock<CallLock> begin() const;
  /// Whether the handle may be freed here. In a child it may have to be left as it is: ranks and
  /// GPUs would be told of an end that is not theirs.
  [[nodiscard]] bool may_free() const noexcept;
  [[nodiscard]] const std::shared_ptr<CallLock>& lock() const { return lock_; }

 private:
  const char* what_;
  StaysBehind part_;
  std::uint32_t made_in_;
  pid_t made_by_;
  std::shared_ptr<CallLock> lock_;
};

}  // namespace switchyard::capi
