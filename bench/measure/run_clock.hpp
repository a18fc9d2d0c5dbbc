#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "bench/measure/stage_times.hpp"
#include "switchyard/execution.hpp"

namespace switchyard::bench {

/// One call of what is measured: told where to report its stages (null: nowhere) and on which
/// stream to work.
using MeasuredCall = std::function<void(StageRecorder* recorder, void* stream)>;

/// What one of many calls takes that follow each other, as the layers of a model do: medians in
/// microseconds.
struct ChainTimes {
  int calls = 0;
  double graph_us = 0;  ///< All in one graph.
  double eager_us = 0;  ///< Enqueued one by one.
  double host_us = 0;   ///< Until the host had enqueued it, then.
};

/// Enqueues the i-th call.
using ChainedCall = std::function<void(int i, void* stream)>;

/// Takes times where the work is done. Stages go to the StageTimes that it was made with.
class RunClock {
 public:
  virtual ~RunClock() = default;
  /// Calls once with stages recorded. On the CPU the time is that of this call, on its steady
  /// clock. On CUDA stages are taken by events; then the same work runs once more from a graph,
  /// captured at the first run of each `key`, without anything between its kernels: the time is
  /// that of the graph.
  /// @returns microseconds.
  virtual double run(const void* key, const MeasuredCall& call) = 0;
  /// As run(), without stages: on CUDA the graph alone.
  virtual double run_whole(const void* key, const MeasuredCall& call) = 0;
  /// On CUDA; nothing is flushed, so the calls see to it that they find nothing in a cache. None on
  /// the CPU.
  virtual std::optional<ChainTimes> run_chain(int calls, int repeats, const ChainedCall& call) = 0;

  /// For calls that use up what they work on: `prepare` makes it anew, and waits for it, before
  /// each time that run() or run_whole() do their call; its time is in none of theirs. Empty:
  /// nothing.
  void prepare_by(std::function<void()> prepare) { prepare_ = std::move(prepare); }

 protected:
  void prepare() const {
    if (prepare_) prepare_();
  }

 private:
  std::function<void()> prepare_;
};

/// @param meet  Called on CUDA before each timed run: where ranks wait until all have their graphs.
[[nodiscard]] std::unique_ptr<RunClock> make_run_clock(Backend backend, StageTimes& times,
                                                       std::function<void()> meet = {});

}  // namespace switchyard::bench
