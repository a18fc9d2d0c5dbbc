#pragma once

// `evaluate --specialisation`: what the routers of a trained model choose by, beside an untrained
// router and earlier checkpoints.

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/models/specialisation.hpp"
#include "switchyard/models/trainer.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// Another checkpoint beside the one that is evaluated.
struct CheckpointBeside {
  std::string name{};
  std::optional<std::int64_t> step{};  ///< Where it says one.
  std::vector<double> saturation{};  ///< Of each MoE layer, of the evaluated checkpoint's experts.
  std::vector<double> churn{};       ///< Likewise, to the next checkpoint of the list.
};

struct SpecialisationFindings {
  std::int64_t tokens = 0;
  std::vector<models::LayerSpecialisation> layers{};
  std::vector<models::LayerSpecialisation> untrained{};  ///< Empty: `untrained_words` says why.
  std::string untrained_words{};  ///< Where its values come from, or why there are none.
  std::optional<std::uint64_t> untrained_seed{};
  std::vector<CheckpointBeside> checkpoints{};  ///< Those of --against, in order.
};

/// The directories that --against means: of a run all its checkpoints, of that of `directory` those
/// before it.
/// @throws UsageError: one is none, is of another model, or nothing is left; --against alone.
[[nodiscard]] std::vector<std::filesystem::path> checkpoints_beside(
    const Options& options, const std::filesystem::path& directory);

/// @param model  Of `directory`: other values are loaded, and its own again at the end.
[[nodiscard]] SpecialisationFindings find_specialisation(
    const Options& options, const std::filesystem::path& directory,
    const std::vector<std::filesystem::path>& beside, models::Model& model,
    const models::Text& text);

[[nodiscard]] nlohmann::json to_json(const SpecialisationFindings& found);
void print(const SpecialisationFindings& found);

}  // namespace switchyard::tool
