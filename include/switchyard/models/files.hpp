#pragma once

#include <cstdint>
#include <filesystem>

#include "switchyard/models/config.hpp"
#include "switchyard/models/model.hpp"

namespace switchyard::models {

// A model's directory: config.json and model.safetensors, by the names of transformers' OLMoE or
// Qwen3-MoE, in f32. Where the family can say what the model is, transformers, and Checkpoint of
// switchyard/checkpoint.hpp, read it.

/// The directory that a user means: itself where it has a config.json, else, of a run's directory,
/// its newest checkpoint.
/// @throws Error{kBadFile}: neither is there.
[[nodiscard]] std::filesystem::path model_directory(const std::filesystem::path& path);

/// @throws Error{kBadFile}, {kInvalidArgument}: as parse_model_config().
[[nodiscard]] ModelConfig read_model_config(const std::filesystem::path& directory);

/// Values of all parameters and buffers from the files, f32, bf16 or f16; then
/// Model::parameters_changed().
/// @throws Error{kBadFile} that names file and tensor: one is missing, of another shape or dtype,
///         there but none of the model's, or has a number that is not finite; {kIo};
///         {kInvalidArgument}: the model has a rank's share of the experts, here and in
///         save_model().
void load_parameters(Model& model, const std::filesystem::path& directory);

/// read_model_config(), Model, load_parameters().
[[nodiscard]] Model load_model(const std::filesystem::path& directory,
                               const ModelOptions& options = {});

/// Writes both files into a directory that is there. Each appears whole or not at all, the
/// configuration last; see train() for a directory that does.
/// @throws Error{kInvalidArgument}: it cannot be written to; {kIo}: the disk is full, ...
void save_model(Model& model, const std::filesystem::path& directory);

}  // namespace switchyard::models
