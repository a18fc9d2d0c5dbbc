// `switchyard tokenizer`: a vocabulary from text.
#include "switchyard/models/tokenizer.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "core/printable.hpp"
#include "switchyard/error.hpp"
#include "tool/commands.hpp"
#include "tool/models/common.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/output_files.hpp"

namespace switchyard::tool {
namespace {

std::vector<NamedFile> inputs_of(const Options& options) {
  std::vector<NamedFile> inputs;
  for (const std::string& file : options.texts) inputs.push_back({"--text", file});
  return inputs;
}

std::int64_t count_tokens(const models::Text& text) {
  std::int64_t tokens = 0;
  for (const models::Document& document : text.documents()) tokens += document.size();
  return tokens;
}

std::string learn(const std::vector<std::span<const std::byte>>& documents, std::int64_t vocab) {
  try {
    return models::train_tokenizer(documents, vocab);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    throw UsageError("--vocab: {}", message_of(error));
  }
}

}  // namespace

int tokenizer_command(const Options& options) {
  const NamedFile output{"--output", options.output};
  check_output_place(output);
  check_outputs_apart({output}, inputs_of(options));
  std::vector<std::span<const std::byte>> documents;
  const models::Text text = open_text("--text", options.texts);
  for (const models::Document& document : text.documents()) documents.push_back(document.bytes);
  const auto tokenizer = models::parse_tokenizer(learn(documents, options.vocab), options.output);
  // Before anything is written: that the text comes back.
  const std::int64_t tokens = count_tokens(open_text("--text", options.texts, tokenizer));
  write_text(options.output, tokenizer->file());
  if (options.json) {
    nlohmann::json document = start_document(options);
    document["output"] = printable(options.output);
    document["vocabulary"] = tokenizer->vocabulary();
    document["bytes"] = text.num_bytes();
    document["tokens"] = tokens;
    fmt::print("{}\n", document.dump(2));
  } else {
    fmt::print("{}: {} pieces, {} bytes of text in {} tokens, {:.2f} bytes a token\n",
               printable(options.output), tokenizer->vocabulary(), text.num_bytes(), tokens,
               static_cast<double>(text.num_bytes()) / static_cast<double>(tokens));
  }
  return kFine;
}

}  // namespace switchyard::tool
