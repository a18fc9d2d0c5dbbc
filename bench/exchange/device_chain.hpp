#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Over the repeats, the slowest rank's time, us; ranks are threads.
class SlowestTimes {
 public:
  void add(int repeat, double us) {
    const std::lock_guard lock(mutex_);
    slowest_.resize(std::max(slowest_.size(), static_cast<std::size_t>(repeat) + 1), 0.0);
    double& slowest = slowest_[static_cast<std::size_t>(repeat)];
    slowest = std::max(slowest, us);
  }
  [[nodiscard]] bool empty() const { return slowest_.empty(); }
  [[nodiscard]] double median() { return quantile(0.5); }
  /// Of which the share `q` is not larger.
  [[nodiscard]] double quantile(double q) {
    std::ranges::sort(slowest_);
    const auto at = static_cast<std::size_t>(q * static_cast<double>(slowest_.size()));
    return slowest_[std::min(at, slowest_.size() - 1)];
  }

 private:
  std::mutex mutex_;
  std::vector<double> slowest_;
};

inline constexpr int kChainLength = 16;
inline constexpr int kChainRepeats = 7;

struct ChainArgs {
  cudaStream_t stream = nullptr;
  bool in_graph = true;           ///< Else every repeat enqueues: for what a graph cannot hold.
  std::function<void()> check{};  ///< Follows every repeat.
};

/// Collective: captures kChainLength times `enqueue` in a graph and replays it, all ranks at once;
/// adds the time of one.
void time_chain(Communicator& communicator, const ChainArgs& args,
                const std::function<void()>& enqueue, SlowestTimes& times);

inline constexpr int kTailRepeats = 24;

/// The same chains with an event between the exchanges, so that each of kTailRepeats *
/// kChainLength is a time of its own: for the last per cent of them. Kernels of two exchanges do
/// not overlap then.
void time_each(Communicator& communicator, const ChainArgs& args,
               const std::function<void()>& enqueue, SlowestTimes& times);

}  // namespace switchyard
