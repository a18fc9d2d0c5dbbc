#include "tool/models/tokens.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "checkpoint/files/mapped_file.hpp"
#include "core/printable.hpp"
#include "tool/models/common.hpp"
#include "tool/options/usage_error.hpp"

namespace switchyard::tool {
namespace {

/// Bytes as they are where a program reads them; a terminal gets no control characters.
void print_text(std::string text, bool is_terminal) {
  if (is_terminal) text = shown(text);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void print_lines(const Options& options, const std::vector<std::int32_t>& prompt,
                 const models::Generation& made, const models::Tokenizer* tokenizer) {
  const bool is_terminal = isatty(STDOUT_FILENO) == 1;
  for (std::size_t i = 0; i < made.tokens.size(); ++i) {
    if (options.ids || tokenizer == nullptr) {
      fmt::print("{}\n", fmt::join(made.tokens[i], " "));
      continue;
    }
    if (made.tokens.size() > 1) fmt::print("== {} of {}\n", i + 1, made.tokens.size());
    // As one text: a character may begin in the prompt.
    print_text(tokenizer->decode(prompt) + tokenizer->decode(made.tokens[i]), is_terminal);
    fmt::print("\n");
  }
}

}  // namespace

std::vector<std::int32_t> parse_ids(std::string_view text, const std::string& what) {
  constexpr std::string_view kBetween = ", \t\r\n";
  std::vector<std::int32_t> ids;
  for (std::size_t at = text.find_first_not_of(kBetween); at != std::string_view::npos;) {
    const std::size_t end = std::min(text.find_first_of(kBetween, at), text.size());
    const std::string_view word = text.substr(at, end - at);
    std::int32_t id = -1;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || stop != word.data() + word.size() || id < 0) {
      throw UsageError("{}: '{}' is no number of a token", what, printable(word, 40));
    }
    ids.push_back(id);
    at = text.find_first_not_of(kBetween, end);
  }
  return ids;
}

std::vector<std::int32_t> prompt_of(const Options& options, const models::Tokenizer* tokenizer,
                                    std::int64_t vocabulary) {
  const int given = int{!options.prompt_text.empty()} + int{!options.prompt_file.empty()} +
                    int{!options.prompt_ids.empty()};
  if (given != 1) {
    throw UsageError("{}, want one of --prompt TEXT, --prompt-file FILE and --prompt-ids LIST",
                     given == 0
                         ? "no prompt is given"
                         : "more than one of --prompt, --prompt-file, --prompt-ids is given");
  }
  if (!options.prompt_ids.empty()) {
    std::vector<std::int32_t> ids = parse_ids(options.prompt_ids, "--prompt-ids");
    if (ids.empty()) throw UsageError("--prompt-ids: there is no number in it");
    for (const std::int32_t id : ids) {
      if (id >= vocabulary) {
        throw UsageError("--prompt-ids: {}, but the model has tokens 0 to {}", id, vocabulary - 1);
      }
    }
    return ids;
  }
  const bool is_file = !options.prompt_file.empty();
  if (tokenizer == nullptr) {
    throw UsageError(
        "{}: the model has a vocabulary of {} tokens, not of bytes, and no tokenizer of train, "
        "want their numbers: --prompt-ids",
        is_file ? "--prompt-file" : "--prompt", vocabulary);
  }
  const std::string text = is_file ? read_text(options.prompt_file) : options.prompt_text;
  if (text.empty()) throw UsageError("--prompt-file: {} is empty", options.prompt_file);
  return tokenizer->encode(text);
}

std::int64_t new_tokens_of(const Options& options, std::size_t prompt, std::int64_t positions) {
  constexpr std::int64_t kUsual = 128;
  const std::int64_t most = positions - static_cast<std::int64_t>(prompt) + 1;
  if (most < 1) {
    throw UsageError("the prompt has {} tokens, but the model has {} positions", prompt, positions);
  }
  const std::int64_t count = options.max_new_tokens.value_or(std::min(kUsual, most));
  if (count <= most) return count;
  throw UsageError(
      "--max-new-tokens: {} behind a prompt of {} tokens, but the model has {} positions (the last "
      "token needs none): want at most {}",
      count, prompt, positions, most);
}

models::GenerateArgs generate_args(const Options& options, const std::vector<std::int32_t>& prompt,
                                   std::int64_t new_tokens) {
  return {.prompt = prompt,
          .batch = options.batch,
          .max_new_tokens = new_tokens,
          .sampling = {.temperature = options.temperature,
                       .top_k = options.top_k.value_or(0),
                       .top_p = options.top_p,
                       .seed = static_cast<std::uint64_t>(options.seed)},
          .batch_invariant = options.batch_invariant};
}

void print_generation(const Options& options, const std::filesystem::path& directory,
                      const std::vector<std::int32_t>& prompt, const models::Generation& made,
                      const models::Tokenizer* tokenizer) {
  if (!options.json) return print_lines(options, prompt, made, tokenizer);
  nlohmann::json document = start_document(options);
  document["checkpoint"] = printable(directory.string());
  document["prompt_tokens"] = prompt.size();
  document["prompt_seconds"] = made.prompt_seconds;
  document["decode_seconds"] = made.decode_seconds;
  document["tokens"] = made.tokens;
  if (tokenizer != nullptr) {
    document["text"] = nlohmann::json::array();
    for (const auto& tokens : made.tokens) {
      document["text"].push_back(shown(tokenizer->decode(tokens)));
    }
  }
  fmt::print("{}\n", document.dump(2));
}

}  // namespace switchyard::tool
