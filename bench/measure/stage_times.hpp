#pragma once

// Times of the stages of a layer, taken on the CPU's steady clock.

#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/execution.hpp"

namespace switchyard::bench {

/// A stage, its work in one run, its time in each run, and what ran it ("": nothing was chosen).
struct StageSamples {
  std::string stage;
  StageWork work;
  std::vector<double> us;
  std::string implementation{};
};

/// What runs the calls of a run, as a recorder is told.
class ChosenImplementations {
 public:
  void chose(std::string_view call, std::string_view implementation) {
    by_call_[std::string(call)] = implementation;
  }
  /// Of the call that has `stage`; "layer": what does plan and experts at once where no recorder
  /// wants their times.
  [[nodiscard]] std::string of(std::string_view stage) const;

 private:
  std::map<std::string, std::string, std::less<>> by_call_;
};

/// Takes the times of one rank. A stage that comes more than once in a run is summed.
class StageTimes : public StageRecorder {
 public:
  StageTimes() = default;
  explicit StageTimes(std::vector<StageSamples> samples) : samples_(std::move(samples)) {}

  void begin(std::string_view stage, void* stream) override;
  void end(std::string_view stage, const StageWork& work, void* stream) override;
  void chose(std::string_view call, std::string_view implementation) override {
    chosen_.chose(call, implementation);
  }
  /// A time taken elsewhere, in microseconds.
  void add(std::string_view stage, const StageWork& work, double us);
  /// The rows of the last run, which a stage on a GPU does not know (StageWork::most_rows).
  void count_rows(std::int64_t used, std::int64_t executed);
  /// Between runs; whatever a stage did since the last call is one sample.
  void start_run();
  /// Forget the samples so far: they were the warm-up.
  void forget();
  [[nodiscard]] const std::vector<StageSamples>& samples() const { return samples_; }

 private:
  using Clock = std::chrono::steady_clock;
  std::vector<StageSamples> samples_;
  ChosenImplementations chosen_;
  std::size_t runs_ = 0;
  Clock::time_point begin_;
};

/// The stages of all ranks as one: per run the slowest rank's time, and the sum of their work.
[[nodiscard]] std::vector<StageSamples> merge_ranks(const std::vector<StageTimes>& ranks);

/// Move "layer" to the end and give it the work of all other stages.
void layer_last(std::vector<StageSamples>& stages);

struct Statistics {
  double median = 0, p95 = 0, mean = 0, std = 0;
};

/// Of at least one sample.
[[nodiscard]] Statistics statistics(std::vector<double> samples);

}  // namespace switchyard::bench
