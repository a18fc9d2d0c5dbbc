#pragma once

// What a run is besides its model: configuration, text, moments; and how it gets into a checkpoint
// and out of it.

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <filesystem>

#include "models/training/replicas.hpp"
#include "switchyard/models/trainer.hpp"

namespace switchyard::models {

inline constexpr const char* kOptimizerFile = "optimizer.safetensors";

/// All that decides the bytes of a run.
[[nodiscard]] nlohmann::json run_json(const TrainConfig& config, const Text& text);
/// The same, held against that of all processes, which may be on machines with other files.
/// Collective. @throws CommonError{kCommunication}: what differs, and whose.
[[nodiscard]] nlohmann::json run_json(const TrainConfig& config, const Text& text,
                                      const Text* valid, const TrainOptions& options);

/// Writes a whole checkpoint of `step` steps into a directory: the same files for any number of
/// ranks. Collective over processes, of which the first writes; so is reading, by each of them.
void write_checkpoint(Replicas& replicas, const nlohmann::json& run, std::int64_t step,
                      const std::filesystem::path& directory);

/// The other way, whatever number of ranks has written it. @returns the step.
/// @throws Error{kInvalidArgument}: of a run with another configuration or text, by the first key
///         that differs and both values; {kBadFile}: a file is damaged, by its tensor.
[[nodiscard]] std::int64_t read_checkpoint(Replicas& replicas, const nlohmann::json& run,
                                           const std::filesystem::path& directory);

}  // namespace switchyard::models
