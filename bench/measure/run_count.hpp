#pragma once

#include <algorithm>
#include <chrono>

namespace switchyard::bench {

/// How often something is run: `warmup` and `iterations` times, or fewer where that would take much
/// longer than `budget`.
struct RunCount {
  int warmup = 1;
  int iterations = 1;
  std::chrono::duration<double> budget{0};  ///< 0: exactly as often as said.
};

/// Decides from the time of the first run, which must be the same on all ranks.
class RunCounter {
 public:
  explicit RunCounter(const RunCount& count)
      : count_(count), warmup_(count.warmup), iterations_(count.iterations) {}

  [[nodiscard]] bool wants_time() const { return count_.budget.count() > 0; }
  /// After the first warm-up run.
  void set_time(std::chrono::duration<double> first) {
    if (!wants_time()) return;
    const double fit = count_.budget / std::max(first, std::chrono::duration<double>(1e-7));
    const auto most = [](double wanted, int least, int limit) {
      return std::clamp(static_cast<int>(std::min(wanted, 1e6)), std::min(least, limit), limit);
    };
    warmup_ = most(fit / 4, 1, count_.warmup);
    iterations_ = most(fit, 3, count_.iterations);
  }
  [[nodiscard]] int warmup() const { return warmup_; }
  [[nodiscard]] int total() const { return warmup_ + iterations_; }

 private:
  RunCount count_;
  int warmup_;
  int iterations_;
};

}  // namespace switchyard::bench
