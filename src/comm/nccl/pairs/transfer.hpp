#pragma once

#include <cstdint>
#include <memory>

#include "comm/device/exchange.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

struct NcclTransferArgs {
  ExchangeLayout layout{};
  std::int64_t max_tokens = 0;
  int groups = 1;              ///< Rows that come home for each that was received.
  DType dtype = DType::kBF16;  ///< Of tokens.
  int ctas = 0;                ///< Of the kernels before and after a transfer.
  std::uint64_t timeout_ns = 0;
  /// Every pair moves max_tokens rows, into the places of its source: nothing is known on the host,
  /// and a graph may hold it; the layout has one buffer. Else the host reads the counts of each
  /// dispatch, waits for them, and rows lie without a gap.
  bool padded = true;
};

/// The exchange where a GPU cannot write to another's memory: rows are packed, and moved into the
/// others' windows by ncclSend and ncclRecv. The windows of all parameters are this rank's own.
class NcclTransfer {
 public:
  /// Collective, on the current device: connects all pairs, so that later calls can be captured.
  /// @throws As NcclPairs; Error{kOutOfMemory}.
  NcclTransfer(Communicator& communicator, const NcclTransferArgs& args);
  /// Collective; waits for what is under way on the device, and for the others up to the
  /// communicator's timeout.
  ~NcclTransfer();
  NcclTransfer(const NcclTransfer&) = delete;
  NcclTransfer& operator=(const NcclTransfer&) = delete;

  [[nodiscard]] std::byte* window() const;
  [[nodiscard]] bool padded() const;
  /// `epoch` counts dispatches from 1. Only enqueues where padded. @throws Error{kTimeout},
  /// {kCommunication} as check(); {kUnsupported}: the stream is captured, and counts are read on
  /// the host.
  void dispatch(const DeviceDispatchParams& params, std::uint64_t epoch, void* stream);
  /// Only enqueues.
  void combine(const DeviceCombineParams& params, void* stream);
  /// @throws Error{kTimeout}: a transfer has not ended within the deadline and was given up, which
  /// takes NCCL's communicator and all graphs with it; {kCommunication} in NCCL's words.
  void check() const;
  /// Collective, where no kernel runs any more: as at first, with a new NCCL communicator.
  void renew();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
