#pragma once

#include <cstdint>
#include <memory>

#include "comm/device_exchange.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

struct NcclTransferArgs {
  ExchangeLayout layout{};
  std::int64_t max_tokens = 0;
  std::uint64_t timeout_ns = 0;
  /// Every pair moves max_tokens rows, into the places of its source: nothing is known on the host,
  /// and a graph may hold it. Else the host reads the counts of each dispatch, waits for them, and
  /// rows lie without a gap.
  bool padded = true;
};

/// The way of an exchange's rows where a GPU cannot write to another's memory: packed into a
/// staging part with the layout of a window, those to rank d in the places of source d, and moved
/// from there into the others' windows by ncclSend and ncclRecv.
class NcclTransfer {
 public:
  /// Collective, on the current device: connects all pairs, so that later calls can be captured.
  /// @throws As NcclPairs; Error{kOutOfMemory}.
  NcclTransfer(Communicator& communicator, const NcclTransferArgs& args);
  /// Waits for what is under way on the device. Collective, unless kept.
  ~NcclTransfer();
  NcclTransfer(const NcclTransfer&) = delete;
  NcclTransfer& operator=(const NcclTransfer&) = delete;

  /// `params` as the kernel of a step wants them: windows, places, progress.
  [[nodiscard]] DeviceExchangeParams for_step(DeviceExchangeParams params, DeviceStep step) const;
  [[nodiscard]] std::byte* window() const;
  /// Moves the rows of dispatch `epoch`, between its two steps. Only enqueues where padded.
  /// @throws Error{kTimeout}, {kCommunication} as check(); {kUnsupported}: the stream is captured,
  /// and counts are read on the host.
  void send_rows(std::uint64_t epoch, void* stream);
  /// Only enqueues.
  void send_results(void* stream);
  /// @throws Error{kTimeout}: a transfer has not ended within the deadline and was given up, which
  /// takes NCCL's communicator and all graphs with it; {kCommunication} in NCCL's words.
  void check() const;
  /// Collective, where no kernel runs any more: as at first, with a new NCCL communicator.
  void renew();
  void keep();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
