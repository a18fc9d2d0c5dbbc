#pragma once

// What ranks have in common that see each other's memory: threads of one process, or processes of
// one host. Waiting is looking at atomic counters; nothing here takes a lock, so that a process
// that is killed leaves none behind.

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/exchange_layout.hpp"
#include "comm/ranks/deadline.hpp"
#include "comm/ranks/topology.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

/// What the ranks know of each other; zero at first, in memory that all of them see.
struct ControlBlock {
  template <typename T>
  using PerRank = std::array<T, kMaxRanks>;

  std::atomic<std::uint32_t> failed;  ///< 0: no; 1: the reason is being written; 2: yes.
  std::atomic<std::uint64_t> recovered;
  PerRank<std::atomic<std::uint64_t>> arrived;   ///< Barriers that the rank has come to.
  PerRank<std::atomic<std::uint32_t>> recovery;  ///< RecoveryStep.
  /// Bytes, signals and two words of the engine for the window that is being made.
  PerRank<std::array<std::atomic<std::uint64_t>, 4>> offer;
  std::array<char, 1024> reason;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class SharedWindow;

/// One rank of an engine whose ranks see each other's memory.
class SharedRank : public Communicator {
 public:
  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] const Topology& topology() const override { return topology_; }
  void set_timeout(std::chrono::milliseconds limit) override { timeout_ = limit; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }
  [[nodiscard]] std::uint64_t recoveries() const override { return control_->recovered.load(); }
  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override;
  void barrier(const char* phase) override;
  void give_up(const std::string& reason) noexcept override;
  void recover() override;

  /// After a store (seq_cst) that `rank` may be waiting for.
  virtual void ring(int rank) noexcept = 0;
  /// Wait for `ready`, leaving with kTimeout at the deadline or, where it is not ready, once a rank
  /// has given up. `describe()` has phase, rank, expected and seen.
  void wait(const std::function<bool()>& ready, const std::function<std::string()>& describe);

 protected:
  SharedRank(std::shared_ptr<ControlBlock> control, int rank, int size)
      : control_(std::move(control)),
        rank_(rank),
        size_(size),
        topology_(topology_of_this_host(size)) {}

  /// Memory of a window's part, alive as long as somebody holds it.
  using Part = std::shared_ptr<std::byte>;
  /// Zeroed memory of this rank; `words` tell the others how to find it.
  virtual Part make_part(std::size_t bytes, std::array<std::uint64_t, 2>& words) = 0;
  /// The part of another rank, while its owner waits in create_window().
  virtual Part open_part(int rank, std::size_t bytes, std::array<std::uint64_t, 2> words) = 0;
  /// Wait, without a failure ending it. @return ready().
  virtual bool sleep_until(const std::function<bool()>& ready, Deadline deadline) = 0;

 private:
  friend class SharedWindow;
  void ring_all() noexcept;
  [[nodiscard]] std::string reason() const;
  [[nodiscard]] int first_away() const;
  void take_all(Deadline deadline);
  void follow(Deadline deadline);
  [[noreturn]] void leave_recovery();

  std::shared_ptr<ControlBlock> control_;
  const int rank_;
  const int size_;
  const Topology topology_;
  std::chrono::milliseconds timeout_{10000};
  std::vector<SharedWindow*> windows_;  // this rank's, alive
};

}  // namespace switchyard
