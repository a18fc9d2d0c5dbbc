#pragma once

#include <functional>
#include <memory>

#include "comm/nccl/library.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

/// How a wait for other ranks inside NCCL ends at a deadline.
enum class NcclWaits {
  kPolled,    ///< A communicator that does not block; its calls are asked for until they are done.
  kOnThread,  ///< One that blocks, as windows want it in 2.28; its calls have a thread of their
              ///< own, which is left behind past the deadline.
};

/// This rank's part of an NCCL communicator over the same ranks; every wait for others ends at the
/// deadline of `communicator`.
class NcclRank {
 public:
  /// Collective, on the current device; the unique id goes from rank 0 to the others through
  /// `communicator`. @throws Error{kTimeout}; {kCommunication} in NCCL's words; {kUnsupported}.
  NcclRank(Communicator& communicator, NcclWaits waits);
  /// Collective, unless abandoned.
  ~NcclRank();
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  /// Runs `body` to its end. What it refers to has to live on by itself: `body` may go on after a
  /// deadline. @throws Error{kTimeout}, after which the communicator is of no use;
  /// {kCommunication}.
  void call(const char* what, const std::function<ncclResult_t()>& body);
  /// @throws Error{kCommunication} in NCCL's words if anything has failed since.
  void check() const;
  /// The other ranks are not waited for at the end.
  void abandon() { abandoned_ = true; }
  /// Makes NCCL's kernels leave; nothing may be called after it.
  void abort() noexcept;
  [[nodiscard]] bool abandoned() const { return abandoned_; }
  [[nodiscard]] const NcclLibrary& nccl() const { return nccl_; }
  [[nodiscard]] ncclComm_t get() const { return *comm_; }

 private:
  ncclResult_t run_on_thread(const char* what, const std::function<ncclResult_t()>& body);
  ncclResult_t poll(ncclResult_t status, const char* what);
  [[noreturn]] void fail_late(const char* what);
  [[noreturn]] void fail_with(ncclResult_t status, const char* what) const;

  const NcclLibrary& nccl_;
  Communicator& communicator_;
  NcclWaits waits_;
  int device_ = 0;
  std::shared_ptr<ncclComm_t> comm_;  // a call that is left behind may still write it
  bool abandoned_ = false;
  bool left_behind_ = false;  // a thread is still in a call
};

}  // namespace switchyard
