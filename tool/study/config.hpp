#pragma once

// What a study file says: arms that are trained side by side, and how they are compared.

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/models/trainer.hpp"

namespace switchyard::tool {

struct StudyArm {
  std::string name{};  ///< Of a directory, too: letters, digits, and -_.+ inside.
  /// All but seed, learning rate and length, which are the runs'. Text, sequence, sequences of a
  /// step and schedule are the same in all arms.
  models::TrainConfig train{};
  /// An arm before this one: each run begins with the weights that its run of the same seed ends
  /// with.
  std::optional<std::size_t> init{};
};

/// How each arm gets its learning rate: the same rates, steps and seed for all.
struct StudyTuning {
  std::int64_t seed = 0;        ///< None of StudyConfig::seeds.
  std::int64_t steps = 0;       ///< Of a run.
  std::vector<double> rates{};  ///< Ascending. One: it is taken as it is.
  std::int64_t extend = 0;      ///< Most further rates where the best is the last on its side.
};

struct StudyConfig {
  std::string name{}, what{};
  std::vector<std::string> texts{}, valid{};  ///< Paths, from where the file lies.
  std::vector<std::int64_t> seeds{};
  StudyTuning tuning{};
  std::int64_t valid_every = 0;  ///< Steps between losses on held-out text.
  std::int64_t save_every = 0;   ///< Steps between checkpoints of a run that is not finished.
  bool equal_time = false;       ///< Also runs of as many steps as the reference's time allows.
  std::size_t reference = 0;     ///< Of `arms`.
  std::vector<StudyArm> arms{};

  /// By name. @throws UsageError with all names.
  [[nodiscard]] std::size_t find(std::string_view arm) const;
};

/// A learning rate by four digits: a name, and no false precision.
[[nodiscard]] double rounded_rate(double rate);

/// @param source  The file, for messages and as the place that its paths begin at.
/// @throws UsageError, Error{kBadFile, kInvalidArgument}: no JSON; a key that is not known, with
///         those that are; a value out of range, an arm that breaks a rule, by its name.
[[nodiscard]] StudyConfig parse_study(std::string_view text, const std::filesystem::path& source);

}  // namespace switchyard::tool
