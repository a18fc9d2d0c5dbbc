#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Median over the repeats of the slowest rank's time, us; ranks are threads.
class SlowestTimes {
 public:
  void add(int repeat, double us) {
    const std::lock_guard lock(mutex_);
    slowest_.resize(std::max(slowest_.size(), static_cast<std::size_t>(repeat) + 1), 0.0);
    double& slowest = slowest_[static_cast<std::size_t>(repeat)];
    slowest = std::max(slowest, us);
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    slowest_.clear();
  }
  [[nodiscard]] double median() {
    std::ranges::sort(slowest_);
    return slowest_[slowest_.size() / 2];
  }

 private:
  std::mutex mutex_;
  std::vector<double> slowest_;
};

inline constexpr int kChainLength = 16;
inline constexpr int kChainRepeats = 7;

struct ChainArgs {
  cudaStream_t stream = nullptr;
  std::function<void()> enqueue{};
  std::function<void()> check{};  ///< After every chain.
  bool graph = true;              ///< Captured once and replayed; else enqueued each time.
};

/// Collective: runs kChainLength times `enqueue`, all ranks at once, and adds the time of one.
void time_chain(Communicator& communicator, const ChainArgs& args, SlowestTimes& times);

}  // namespace switchyard
