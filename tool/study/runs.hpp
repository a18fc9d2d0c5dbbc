#pragma once

// One run of a study: trained, evaluated, and written down.

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/measure/machine.hpp"
#include "switchyard/models/text.hpp"
#include "tool/study/plan.hpp"

namespace switchyard::tool {

/// What all runs of a study are done with.
struct StudyPlace {
  const StudyConfig& study;
  const models::Text& text;
  const models::Text& valid;
  const RunResults& results;  ///< Of runs that are done, for what others begin with.
  std::filesystem::path directory{};
  Backend backend = Backend::kCpu;
  int num_threads = 1;
  bench::Machine machine{};
  bench::Limits limits{};
};

/// The file of a run that is finished; it appears whole.
inline constexpr const char* kRunFile = "result.json";

/// All runs that are there. @throws UsageError: one of another text or configuration, by the key
/// that differs; Error{kBadFile}: a file that is none of ours.
[[nodiscard]] RunResults read_runs(const StudyPlace& place);

/// That a finished run is of this study as it stands. @throws UsageError by the key that differs.
void check_same(const StudyPlace& place, const StudyRun& run, const nlohmann::json& result);

struct RunCalls {
  std::function<void(const models::StepRecord&)> on_step{};
  std::function<bool()> stop{};
};

/// Removes the checkpoints of a finished run that only chose a rate and that no arm begins with.
void drop_weights(const StudyPlace& place, const std::string& name, const nlohmann::json& result);

/// Trains (or goes on with what is there), evaluates the last step's model and writes kRunFile, a
/// line of bench with the run, its curve, its losses by blocks of the text, and its leaks.
/// @returns that; nothing: it was stopped.
[[nodiscard]] std::optional<nlohmann::json> do_run(const StudyPlace& place, const StudyRun& run,
                                                   const RunCalls& calls);

/// Seconds that a run is expected to take, with what is evaluated.
[[nodiscard]] double estimated_seconds(const StudyPlace& place, const StudyRun& run);

}  // namespace switchyard::tool
