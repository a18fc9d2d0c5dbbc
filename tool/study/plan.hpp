#pragma once

// Which runs a study has, in the order of what they are worth, and what is to be done next.

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tool/study/config.hpp"

namespace switchyard::tool {

enum class RunKind : std::uint8_t {
  kTune,  ///< Of one learning rate, on the seed that no claim uses.
  kTest,  ///< Of a seed, for as many tokens as all arms.
  kTime,  ///< Of a seed, for as long as the reference takes.
};

/// "tune", "seed", "time".
[[nodiscard]] const char* to_string(RunKind kind);

struct StudyRun {
  std::size_t arm = 0;
  RunKind kind = RunKind::kTest;
  std::int64_t seed = 0;
  double rate = 0;  ///< The learning rate at its peak.
  std::int64_t steps = 0;
};

/// "hash/seed-1", "hash/tune-0.003": the run, and its directory in that of the study.
[[nodiscard]] std::string name_of(const StudyConfig& study, const StudyRun& run);

/// What the trainer is told. Warm-up and decay are the same shares of every run.
[[nodiscard]] models::TrainConfig train_config(const StudyConfig& study, const StudyRun& run);

/// Finished runs by name_of(), as write_run() leaves them: `loss` (null: diverged), `tokens_per_s`.
using RunResults = std::map<std::string, nlohmann::json>;

/// A learning rate with the held-out loss at its end; nothing: it diverged.
using TriedRate = std::pair<double, std::optional<double>>;

/// What the tuning of one arm says.
struct TunedRate {
  std::vector<TriedRate> tried{};  ///< Ascending.
  std::optional<double> next{};    ///< To be tried before there is a `rate`.
  /// The lowest point of a parabola in the logarithm through the best and its neighbours, four
  /// digits; the best itself where it has none on a side.
  double rate = 0;
  bool is_edge = false;  ///< The best is the last on its side: a better one may lie outside.
  /// By how much the neighbours of the best lose: an arm that wins only at its own rate is
  /// sensitive.
  std::optional<double> below{}, above{};
};
[[nodiscard]] TunedRate tune(const StudyTuning& tuning, std::vector<TriedRate> tried);
[[nodiscard]] TunedRate tuned_rate(const StudyConfig& study, std::size_t arm,
                                   const RunResults& results);

/// The run that this one begins with, of StudyArm::init: that of the same seed, or, to tune, the
/// tuning's best so far. Nothing: it begins with random weights.
[[nodiscard]] std::optional<StudyRun> init_run(const StudyConfig& study, const StudyRun& run,
                                               const RunResults& results);

/// Steps that the arm does in the time of the reference's, by the medians of their rates; nothing
/// before all of both arms' seeds are there.
[[nodiscard]] std::optional<std::int64_t> steps_at_equal_time(const StudyConfig& study,
                                                              std::size_t arm,
                                                              const RunResults& results);

/// The run to do now: tuning, then the first seed of all arms, the second, ..., then at equal time.
/// @param arms     Which of them run.
/// @param running  Names of those that are under way. What wants one of them first is passed over.
/// @returns Nothing: all are done or under way, or wait for one of these.
[[nodiscard]] std::optional<StudyRun> next_run(const StudyConfig& study,
                                               const std::vector<std::size_t>& arms,
                                               const RunResults& results,
                                               const std::set<std::string>& running = {});

/// All of them as far as they can be known: without rates that extend a grid, at equal time with
/// the reference's steps.
[[nodiscard]] std::vector<StudyRun> planned_runs(const StudyConfig& study,
                                                 const std::vector<std::size_t>& arms);

}  // namespace switchyard::tool
