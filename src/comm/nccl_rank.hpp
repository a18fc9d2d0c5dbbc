#pragma once

#include "comm/nccl_library.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

/// This rank's part of an NCCL communicator over the same ranks: made without blocking, and every
/// wait for others ends at the deadline of `communicator`.
class NcclRank {
 public:
  /// Collective, on the current device; the unique id goes from rank 0 to the others through
  /// `communicator`. @throws Error{kTimeout}; {kCommunication} in NCCL's words; {kUnsupported}.
  explicit NcclRank(Communicator& communicator);
  /// Collective, unless abandoned.
  ~NcclRank();
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  /// Ends a call that has returned `status`, or is still under way.
  /// @throws Error{kTimeout}, after which the communicator is of no use; {kCommunication}.
  void finish(ncclResult_t status, const char* what);
  /// @throws Error{kCommunication} in NCCL's words if anything has failed since.
  void check() const;
  /// The other ranks are not waited for at the end.
  void abandon() { abandoned_ = true; }
  /// Makes NCCL's kernels leave; nothing may be called after it.
  void abort() noexcept;
  [[nodiscard]] const NcclLibrary& library() const { return nccl_; }
  [[nodiscard]] ncclComm_t get() const { return comm_; }

 private:
  [[noreturn]] void fail_with(ncclResult_t status, const char* what) const;

  const NcclLibrary& nccl_;
  Communicator& communicator_;
  ncclComm_t comm_ = nullptr;
  bool abandoned_ = false;
};

}  // namespace switchyard
