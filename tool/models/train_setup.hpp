#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "bench/measure/machine.hpp"
#include "switchyard/models/trainer.hpp"
#include "tool/options/options.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {

/// What the options say of a run.
struct TrainSetup {
  std::string name{};  ///< The preset, or the file.
  models::TrainConfig config{};
  std::shared_ptr<const models::Tokenizer> tokenizer{};
  models::TrainOptions options{};
};

/// How long a rank waits for another.
[[nodiscard]] std::chrono::milliseconds timeout_of(const Options& options);

/// @throws UsageError, Error: options that contradict each other, or break a rule.
[[nodiscard]] TrainSetup train_setup(const Options& options, const World& world);

/// Before anything is done. @throws UsageError: an output is an input, cannot be written, ...
void check_train_places(const Options& options);

/// A run with what was expected of it.
struct TrainOutcome {
  models::TrainEstimate estimate{};
  double base_bytes = 0;  ///< Of all ranks' processes before they began.
  models::TrainResult result{};
  double peak_bytes = 0;
  std::vector<double> step_us{};
};

/// As one line of bench: stage "train_step", suite "train".
[[nodiscard]] nlohmann::json train_line(const TrainSetup& setup, const TrainOutcome& outcome,
                                        const bench::Machine& machine, const bench::Limits& limits);

}  // namespace switchyard::tool
