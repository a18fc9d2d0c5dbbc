#pragma once

// Tokens on their way in and out of a model: text, or numbers.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/models/generate.hpp"
#include "switchyard/models/tokenizer.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// Numbers apart by commas or blanks. @param what  Where they stand, for messages.
/// @throws UsageError that names the word which is no number of a token.
[[nodiscard]] std::vector<std::int32_t> parse_ids(std::string_view text, const std::string& what);

/// What --prompt, --prompt-file or --prompt-ids says.
/// @param tokenizer  Null: nobody knows the text of the model's `vocabulary`.
/// @throws UsageError: none of them, or two; an empty one; text where nobody knows its tokens.
[[nodiscard]] std::vector<std::int32_t> prompt_of(const Options& options,
                                                  const models::Tokenizer* tokenizer,
                                                  std::int64_t vocabulary);

/// --max-new-tokens; without it 128, or as many as there are positions for.
/// @throws UsageError: they and the prompt are more than the model's positions.
[[nodiscard]] std::int64_t new_tokens_of(const Options& options, std::size_t prompt,
                                         std::int64_t positions);

/// As GenerateArgs, by the options. @param new_tokens  As new_tokens_of().
[[nodiscard]] models::GenerateArgs generate_args(const Options& options,
                                                 const std::vector<std::int32_t>& prompt,
                                                 std::int64_t new_tokens);

/// The prompt and what follows it, or with --json a document of it. Without a
/// tokenizer numbers alone.
void print_generation(const Options& options, const std::filesystem::path& directory,
                      const std::vector<std::int32_t>& prompt, const models::Generation& made,
                      const models::Tokenizer* tokenizer);

}  // namespace switchyard::tool
