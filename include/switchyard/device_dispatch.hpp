#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "switchyard/dispatch.hpp"

namespace switchyard {

/// How ranks on GPUs exchange.
enum class ExchangeMode : std::uint8_t {
  kAuto,  ///< kLowLatency up to 512 tokens a rank and without max_recv_rows, else kThroughput.
  kThroughput,  ///< Counts first; rows lie without a gap, sorted by (source rank, token).
  kLowLatency,  ///< Row j of source s lies at s * max_tokens + j; nothing is waited for before rows
                ///< are sent. Every dispatch must be followed by its combine.
};

struct DeviceExchangeOptions {
  int device = 0;  ///< CUDA device of this rank; ranks may share one.
  ExchangeMode mode = ExchangeMode::kAuto;
  DeviceEngine engine = DeviceEngine::kAuto;
  /// Thread blocks per direction, the same on all ranks; 0: the fastest that was measured. That is
  /// 64, but 16 for a combine of sums that their readers fetch (Hopper, in a layer or the native
  /// interface) from 4096 tokens of 7168 values on; in low latency 32 for up to 32 tokens of 7168
  /// values and else 128; and 4 where ranks share a device. All blocks of all ranks that share a
  /// device must fit on it at once, one a multiprocessor.
  int ctas = 0;
  /// All dispatches leave what they receive in the same place, so that a graph may hold any number
  /// of them, and half the memory is enough; else an even number, for two places take turns. Every
  /// dispatch must then be followed by its combine.
  bool one_place = false;
  std::chrono::milliseconds timeout = std::chrono::seconds(10);
};

/// What a dispatch leaves on the device, valid until the second following dispatch on the object,
/// or until the next where all leave it in one place.
struct DeviceReceived {
  /// [N max, H] in the wire type: row i counts where ids say so.
  ConstRawMatrix x;
  Matrix<const float> scale;          ///< [N max, ceil(H/128)] of an fp8 wire; else empty.
  Matrix<const std::int32_t> expert;  ///< [N max, K] global ids; -1 where unused, and in all of a
                                      ///< row that holds nothing: plan() takes all N max rows.
  Matrix<const float> weight;         ///< [N max, K].
  const std::int64_t* num_rows = nullptr;  ///< Rows received.
  /// Rows that are dropped because they do not fit into max_recv_rows, to this rank.
  const std::int64_t* dropped_rows = nullptr;
  const std::int64_t* counts = nullptr;  ///< [R*R] rows from s to d, before dropping.
};

/// Dispatch and combine between GPUs by kernels that write straight into each other's memory (peer
/// access and CUDA IPC on one node, NCCL's windows in an NVLink domain), in one launch per
/// direction, without atomics in placement and without the host: both calls only enqueue, and may
/// be captured in a graph. One rank is one device window of any Communicator's rank.
///
/// Every wait on the device has a deadline: when it passes, all ranks' kernels leave, and check()
/// says what was waited for. A rank's object ends with those of all ranks: its memory is theirs to
/// write to, so where they do not come to the end it is not given back.
class DeviceExpertParallel {
 public:
  /// Collective. @throws Error{kCommunication}: ranks disagree; {kInvalidArgument}; {kUnsupported}:
  /// more ranks, or with rank_invariant more ranks times groups, than the kernels are made for (the
  /// message says how many), H not a multiple of 8, max_recv_rows in low latency, more blocks than
  /// the ranks of a device have room for, no way to a rank's memory by `engine` (which rank, on
  /// which node), ranks that share a GPU over NCCL, built without CUDA;
  /// {kOutOfMemory}; {kCommunication} and {kTimeout} from NCCL too, which has the communicator's
  /// deadline.
  DeviceExpertParallel(Communicator& communicator, const ExpertParallelConfig& config,
                       const DeviceExchangeOptions& options);
  ~DeviceExpertParallel();
  DeviceExpertParallel(DeviceExpertParallel&&) noexcept;
  DeviceExpertParallel& operator=(DeviceExpertParallel&&) noexcept;

  /// All pointers on the device, x, shared and out aligned to 16 bytes, work on execution.stream.
  /// An id out of range is reported by check(): nothing on the host looks at it. The first call
  /// after the communicator's own recover() does what recover() here does, so it cannot be
  /// captured.
  DeviceReceived dispatch(const DispatchArgs& args);
  /// `partials` is [N max, H] with the rows of the last dispatch, with rank_invariant [N max * G,
  /// H] for the G groups of subtree(); rows that hold nothing are not read. Type: combine_wire, or
  /// f32 where that is fp8.
  void combine(const ReturnArgs& args);

  /// After the stream has been waited for. @throws Error{kTimeout}: phase, rank, expected, seen;
  /// {kInvalidArgument}: an expert id out of range; {kCommunication}: an error that NCCL has met.
  void check() const;
  /// Collective, after a failure: the same memory works again. kNcclPairs makes NCCL's communicator
  /// anew: graphs with the old one must not be launched again.
  void recover();

  /// The communicator's; where windows reach all ranks these are one domain.
  [[nodiscard]] const Topology& topology() const;
  [[nodiscard]] Subtree subtree() const;
  [[nodiscard]] ExchangeMode mode() const;
  /// kPeer, kNccl or kNcclPairs; a rank alone has kPeer.
  [[nodiscard]] DeviceEngine engine() const;
  [[nodiscard]] int ctas() const;
  /// Ranks on this rank's device, itself included.
  [[nodiscard]] int ranks_on_device() const;
  /// What an exchange with these `counts` of DeviceReceived, copied to the host, has moved.
  [[nodiscard]] Traffic traffic(const std::int64_t* counts) const;

 protected:
  struct State;
  explicit DeviceExpertParallel(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
