// `switchyard generate`: a prompt continued.
#include "switchyard/models/generate.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "checkpoint/files/mapped_file.hpp"
#include "core/printable.hpp"
#include "tool/commands.hpp"
#include "tool/models/common.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/progress.hpp"

namespace switchyard::tool {
namespace {

std::vector<std::int32_t> prompt_of(const Options& options) {
  if (options.prompt_text.empty() == options.prompt_file.empty()) {
    throw UsageError("{}, want one of --prompt TEXT and --prompt-file FILE",
                     options.prompt_text.empty() ? "no prompt is given"
                                                 : "--prompt and --prompt-file are both given");
  }
  const std::string text =
      options.prompt_file.empty() ? options.prompt_text : read_text(options.prompt_file);
  if (text.empty()) throw UsageError("--prompt-file: {} is empty", options.prompt_file);
  std::vector<std::int32_t> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

/// Bytes as they are where a program reads them; a terminal gets no control characters.
void print_text(const std::vector<std::int32_t>& tokens, bool is_terminal) {
  std::string text = shown(tokens);
  if (!is_terminal) {
    text.clear();
    for (const std::int32_t token : tokens) text += static_cast<char>(token);
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void print(const Options& options, const std::vector<std::int32_t>& prompt,
           const models::Generation& made) {
  const bool is_terminal = isatty(STDOUT_FILENO) == 1;
  for (std::size_t i = 0; i < made.tokens.size(); ++i) {
    if (options.ids) {
      fmt::print("{}\n", fmt::join(made.tokens[i], " "));
      continue;
    }
    if (made.tokens.size() > 1) fmt::print("== {} of {}\n", i + 1, made.tokens.size());
    print_text(prompt, is_terminal);
    print_text(made.tokens[i], is_terminal);
    fmt::print("\n");
  }
}

}  // namespace

int generate_command(const Options& options) {
  check_place(options);
  const std::vector<std::int32_t> prompt = prompt_of(options);
  OpenedModel opened = open_model(options);
  const std::int64_t most = opened.model.config().sequence;
  if (std::ssize(prompt) + options.max_new_tokens - 1 > most) {
    throw UsageError(
        "--max-new-tokens: {} behind a prompt of {} bytes, but the model has {} positions (the "
        "last token needs none)",
        options.max_new_tokens, prompt.size(), most);
  }
  ProgressBar bar(static_cast<int>(options.max_new_tokens));
  const models::Generation made = models::generate(
      opened.model, {.prompt = prompt,
                     .batch = options.batch,
                     .max_new_tokens = options.max_new_tokens,
                     .sampling = {.temperature = options.temperature,
                                  .top_k = options.top_k.value_or(0),
                                  .top_p = options.top_p,
                                  .seed = static_cast<std::uint64_t>(options.seed)},
                     .on_token = [&](std::int64_t done) {
                       bar.show(static_cast<int>(done), "tokens");
                       return false;
                     }});
  bar.clear();
  if (!options.json) {
    print(options, prompt, made);
    return kFine;
  }
  nlohmann::json document = start_document(options);
  document["checkpoint"] = printable(opened.directory.string());
  document["prompt_tokens"] = prompt.size();
  document["prompt_seconds"] = made.prompt_seconds;
  document["decode_seconds"] = made.decode_seconds;
  document["tokens"] = made.tokens;
  document["text"] = nlohmann::json::array();
  for (const auto& tokens : made.tokens) document["text"].push_back(shown(tokens));
  fmt::print("{}\n", document.dump(2));
  return kFine;
}

}  // namespace switchyard::tool
