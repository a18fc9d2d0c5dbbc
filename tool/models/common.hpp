#pragma once

// What train, evaluate and generate share.

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/models/model.hpp"
#include "switchyard/models/released.hpp"
#include "switchyard/models/text.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// @throws UsageError: ranks that these commands do not have yet: over ranks there is training
/// alone, on a CPU.
void check_place(const Options& options);

/// Of this process. Sets the instruction set of --isa too.
[[nodiscard]] int choose_threads(const Options& options);

/// @param option  That named the files, for messages. @param tokenizer  Null: tokens are bytes.
[[nodiscard]] models::Text open_text(const char* option, const std::vector<std::string>& files,
                                     std::shared_ptr<const models::Tokenizer> tokenizer = nullptr);

/// The first file of `files` that is one of `others` too, by whatever name; empty: none is.
[[nodiscard]] std::string common_file(const std::vector<std::string>& files,
                                      const std::vector<std::string>& others);
/// @throws UsageError: a file that is trained on is among those that are held out.
void check_held_out(const std::vector<std::string>& texts, const std::vector<std::string>& valid);

/// The model of --model, ready to compute. @param directory  As models::model_directory() gives it.
[[nodiscard]] models::Model open_model(const Options& options,
                                       const std::filesystem::path& directory);

/// The same of a whole model of transformers' families.
[[nodiscard]] models::ReleasedModel open_released(const Options& options,
                                                  const std::filesystem::path& directory);

/// "L2 H64 N4/2 S128 E8 K2 I64 top-k, 0.41 M parameters (0.13 M active)".
[[nodiscard]] std::string words_of(const models::ModelConfig& config);
[[nodiscard]] nlohmann::json json_of(const models::ModelConfig& config);

/// A document of --json: schema, options, and where and by what it was made.
[[nodiscard]] nlohmann::json start_document(const Options& options);

/// Text of a model on its way to JSON or to a terminal, which bytes alone would upset.
[[nodiscard]] std::string shown(std::string_view bytes);

}  // namespace switchyard::tool
