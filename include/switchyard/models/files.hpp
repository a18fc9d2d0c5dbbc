#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "switchyard/models/config.hpp"
#include "switchyard/models/model.hpp"
#include "switchyard/models/tokenizer.hpp"

namespace switchyard::models {

// A model's directory: config.json and model.safetensors, by the names of transformers' OLMoE or
// Qwen3-MoE, in f32; where tokens are not bytes tokenizer.model. Where the family can say what the
// model is, transformers, and Checkpoint of switchyard/checkpoint.hpp, read it.

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

/// Of the file tokenizer.model in a model's directory; null: there is none.
/// @throws Error{kBadFile}, {kIo}, {kUnsupported}: as load_tokenizer().
[[nodiscard]] std::shared_ptr<const Tokenizer> find_tokenizer(
    const std::filesystem::path& directory);
/// The same for a model of so many tokens; without a file bytes where there are 256, else null:
/// nobody knows what its tokens are.
/// @throws Error{kBadFile}: also where the file's pieces are not as many, with both numbers.
[[nodiscard]] std::shared_ptr<const Tokenizer> tokenizer_of(const std::filesystem::path& directory,
                                                            std::int64_t vocabulary);
/// Writes the file whole or not at all; bytes need none. @throws as save_model().
void write_tokenizer(const Tokenizer& tokenizer, const std::filesystem::path& directory);

/// read_model_config(), Model, load_parameters().
[[nodiscard]] Model load_model(const std::filesystem::path& directory,
                               const ModelOptions& options = {});

/// Writes both files into a directory that is there. Each appears whole or not at all, the
/// configuration last; see train() for a directory that does.
/// @throws Error{kInvalidArgument}: it cannot be written to; {kIo}: the disk is full, ...
void save_model(Model& model, const std::filesystem::path& directory);

}  // namespace switchyard::models
