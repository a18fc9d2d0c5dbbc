#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "switchyard/expert_parallel.hpp"

namespace switchyard {

/// How ranks on GPUs exchange.
enum class ExchangeMode : std::uint8_t {
  kAuto,        ///< kLowLatency up to 512 tokens a rank, else kThroughput.
  kThroughput,  ///< Counts first; rows lie without a gap, sorted by (source rank, token).
  kLowLatency,  ///< Row j of source s lies at s * max_tokens + j; nothing is waited for before rows
                ///< are sent. Every dispatch must be followed by its combine.
};

struct DeviceExchangeOptions {
  int device = 0;  ///< CUDA device of this rank; ranks may share one.
  ExchangeMode mode = ExchangeMode::kAuto;
  /// Thread blocks per direction, the same on all ranks; 0: 64. All blocks of
  /// all ranks that share a device must fit on it at once.
  int ctas = 0;
  std::chrono::milliseconds timeout = std::chrono::seconds(10);
};

/// What a dispatch leaves on the device, valid until the second following dispatch on the object.
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
  /// Readiness: counter (s, c) at ready + (s * chunks_stride + c) * 4 has reached `*ready_target`
  /// once all rows of tokens [c, c+1) * tokens_per_chunk of source s are here. Dispatch itself ends
  /// when all are.
  const std::uint64_t* ready = nullptr;
  std::int64_t chunks = 0;
  std::int64_t chunks_stride = 0;
  std::int64_t tokens_per_chunk = 0;
};

/// Dispatch and combine between GPUs of one host by kernels that write straight into each other's
/// memory (peer access or CUDA IPC), in one launch per direction, without atomics in placement and
/// without the host: both calls only enqueue, and may be captured in a graph. At most 8 ranks, and
/// one rank is one device window of any Communicator's rank ("threads" or "mpi" on one host).
///
/// Every wait on the device has a deadline: when it passes, all ranks' kernels leave, and check()
/// says what was waited for.
class DeviceExpertParallel {
 public:
  /// Collective. @throws Error{kCommunication}: ranks disagree; {kInvalidArgument}; {kUnsupported}:
  /// more than 8 ranks, H not a multiple of 8, rank_invariant over several groups, no peer access,
  /// built without CUDA; {kOutOfMemory}.
  DeviceExpertParallel(Communicator& communicator, const ExpertParallelConfig& config,
                       const DeviceExchangeOptions& options);
  ~DeviceExpertParallel();
  DeviceExpertParallel(DeviceExpertParallel&&) noexcept;
  DeviceExpertParallel& operator=(DeviceExpertParallel&&) noexcept;

  /// All pointers on the device, work on execution.stream. An id out of range is reported by
  /// check(): nothing on the host looks at it.
  DeviceReceived dispatch(const DispatchArgs& args);
  /// `partials` is [N max, H] with the rows of the last dispatch; rows that hold nothing are not
  /// read. Type: combine_wire, or f32 where that is fp8.
  void combine(const ReturnArgs& args);

  /// After the stream has been waited for. @throws Error{kTimeout}: phase, rank, expected, seen;
  /// {kInvalidArgument}: an expert id out of range.
  void check() const;
  /// Collective, after a failure: the same memory works again.
  void recover();

  [[nodiscard]] Subtree subtree() const;
  [[nodiscard]] ExchangeMode mode() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
