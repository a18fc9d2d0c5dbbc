#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace switchyard {

/// What a rank waits for: names the wait in kTimeout.
struct WaitTarget {
  const char* phase = "";  ///< "counts", "rows", "results", "window", ...
  int rank = 0;            ///< The rank that has to do something.
};

/// Symmetric memory: one part of equal size on every rank, and signals (64-bit counters, zero at
/// first) beside it. A rank writes into another's part with put() and tells it with signal(); it
/// reads only its own part. One thread of a rank at a time.
class Window {
 public:
  virtual ~Window() = default;
  /// This rank's part, 128-byte aligned. Valid as long as the window.
  [[nodiscard]] virtual std::byte* local() = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  [[nodiscard]] virtual int num_signals() const = 0;
  /// Copy `bytes` from `data` to `offset` in the part of `rank` (itself allowed). The source may be
  /// reused at once. Visible there after a later signal() from here.
  virtual void put(int rank, std::size_t offset, const void* data, std::size_t bytes) = 0;
  /// Where this rank may write into rank's part directly, or null if the engine cannot; the same
  /// visibility as put().
  [[nodiscard]] virtual std::byte* peer(int rank) = 0;
  /// Set counter `index` of `rank` to `value` after all earlier puts to it have landed (release).
  virtual void signal(int rank, int index, std::uint64_t value) = 0;
  /// Wait until this rank's counter `index` is at least `value` (acquire).
  /// @throws Error{kTimeout} that names phase, rank, expected and seen when the communicator's
  ///         deadline passes or another rank has given up.
  virtual std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) = 0;
};

/// Where ranks run. Nodes and domains are numbered from 0 in the order of their lowest ranks, and
/// all ranks have the same numbers.
struct Topology {
  std::vector<std::int32_t> node{};  ///< [R] the host of each rank.
  /// [R]: ranks with the same number reach each other's memory without a message. Of a communicator
  /// the node; of an exchange between GPUs what its windows reach: an NVLink domain may span nodes.
  std::vector<std::int32_t> domain{};
  std::vector<std::string> name{};  ///< [nodes] as the hosts call themselves.

  [[nodiscard]] int num_nodes() const { return static_cast<int>(name.size()); }
  /// For messages: "rank 3 on node 1 (name)".
  [[nodiscard]] std::string place_of(int rank) const;
};

/// The ranks that run one layer together. One object per rank; an engine moves the bytes.
class Communicator {
 public:
  virtual ~Communicator() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual const Topology& topology() const = 0;
  /// "threads", "mpi".
  [[nodiscard]] virtual const char* engine() const = 0;
  /// How long any wait on another rank may take; 10 s at first.
  virtual void set_timeout(std::chrono::milliseconds limit) = 0;
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const = 0;
  /// Collective: symmetric memory of `bytes` on each rank, zeroed.
  /// @throws Error{kTimeout}; {kCommunication}: ranks ask for different sizes, each told whose.
  virtual std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) = 0;
  /// Collective: wait for all ranks.
  virtual void barrier(const char* phase) = 0;
  /// Make every rank that would have to wait, now or later, leave with kTimeout until recover().
  virtual void give_up(const std::string& reason) noexcept = 0;
  /// Collective, after a failure: once all ranks have come, signals are zero and windows usable
  /// again.
  /// @throws Error{kTimeout} if a rank does not come.
  virtual void recover() = 0;
  /// How often recover() has succeeded: what was under way before is void.
  [[nodiscard]] virtual std::uint64_t recoveries() const = 0;
};

/// How GPUs of ranks reach each other's memory.
enum class DeviceEngine : std::uint8_t {
  kAuto,  ///< kPeer, or kNccl where a rank's memory cannot be reached so.
  kPeer,  ///< Peer access within a process, CUDA IPC between processes of one host.
  kNccl,  ///< NCCL's symmetric windows, in one NVLink domain; a GPU for each rank.
  /// No memory of others is reached: rows are packed and moved by ncclSend and ncclRecv. In low
  /// latency padded to max_tokens rows a pair, and may be captured; in throughput mode the host
  /// reads the counts of each dispatch and waits for them. A GPU for each rank.
  kNcclPairs,
};

/// "auto", "peer", "nccl", "nccl-pairs".
[[nodiscard]] const char* to_string(DeviceEngine engine) noexcept;

/// Engine "threads": `num_ranks` ranks of this process. Object r is for rank r's thread.
/// @throws Error{kInvalidArgument} unless 1 <= num_ranks <= 64.
std::vector<std::unique_ptr<Communicator>> make_thread_ranks(int num_ranks);

/// Run `body(communicator)` for each rank in a thread of its own and join them. If a rank throws,
/// the others are made to leave; then the first error (of the lowest rank that did not merely time
/// out because of it) is rethrown.
void run_ranks(int num_ranks, const std::function<void(Communicator&)>& body,
               std::chrono::milliseconds timeout = std::chrono::seconds(10));

/// One rank alone: a communicator of size 1.
std::unique_ptr<Communicator> make_single_rank();

}  // namespace switchyard
