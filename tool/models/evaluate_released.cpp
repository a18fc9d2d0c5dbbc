#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/files/mapped_file.hpp"
#include "core/printable.hpp"
#include "switchyard/models/released.hpp"
#include "tool/commands.hpp"
#include "tool/models/common.hpp"
#include "tool/models/released.hpp"
#include "tool/models/tokens.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/progress.hpp"

namespace switchyard::tool {
namespace {

using models::Score;
using models::TokenDocument;
using nlohmann::json;

std::vector<TokenDocument> read_documents(const Options& options, std::int64_t vocabulary) {
  std::vector<TokenDocument> documents;
  if (options.ids) {
    for (const std::string& file : options.texts) {
      TokenDocument document{file, parse_ids(read_text(file), "--text: " + printable(file))};
      if (document.tokens.size() < 2) {
        throw UsageError("--text: {} has {} tokens, want at least 2", printable(file),
                         document.tokens.size());
      }
      for (const std::int32_t id : document.tokens) {
        if (id < vocabulary) continue;
        throw UsageError("--text: {} has the token {}, the model 0 to {}", printable(file), id,
                         vocabulary - 1);
      }
      documents.push_back(std::move(document));
    }
    return documents;
  }
  if (vocabulary != models::kByteVocabulary) {
    throw UsageError(
        "--text: the model has a vocabulary of {} tokens, not of bytes, want files of their "
        "numbers: --ids",
        vocabulary);
  }
  const models::Text text = open_text("--text", options.texts);
  for (const models::Document& of : text.documents()) {
    TokenDocument document{.name = of.name};
    for (const std::byte byte : of.bytes) document.tokens.push_back(std::to_integer<int>(byte));
    documents.push_back(std::move(document));
  }
  return documents;
}

json score_json(const Score& score) {
  return {{"tokens", score.targets},
          {"nats_per_token", score.nats_per_token()},
          {"perplexity", score.perplexity()},
          {"accuracy", score.accuracy()}};
}

void print_score(const std::string& name, const Score& score) {
  fmt::print("{:<32} {:>10} {:>10.4f} {:>10.3f} {:>9.1f}%\n", printable(name, 80), score.targets,
             score.nats_per_token(), score.perplexity(), 100 * score.accuracy());
}

}  // namespace

int evaluate_released(const Options& options, const std::filesystem::path& directory) {
  const std::pair<const char*, bool> not_here[] = {
      {"--ngram-floor", !options.ngram_floor.empty()},
      {"--leak-audit", options.leak_audit},
      {"--specialisation", options.specialisation},
      {"--against", !options.against.empty()},
      {"--ablate", !options.ablate.empty()},
      {"--sources", !options.sources.empty()},
      {"--passages", options.passages.has_value()},
      {"--max-tokens", options.max_tokens.has_value()}};
  for (const auto& [option, given] : not_here) {
    if (!given) continue;
    throw UsageError("{}: of models that train has written, this one is from elsewhere", option);
  }
  const std::vector<TokenDocument> documents =
      read_documents(options, models::read_released_sizes(directory).vocabulary);
  models::ReleasedModel model = open_released(options, directory);
  if (!options.json) {
    fmt::print("{}: {}\n", printable(directory.string()), model.description());
  }
  LoadBar bar("percent of the text");
  const models::ReleasedEvaluation found =
      models::evaluate(model, documents, 2048, [&](double share) { bar.show(share); });
  bar.clear();
  if (options.json) {
    json document = start_document(options);
    document["checkpoint"] = printable(directory.string());
    document["family"] = model.family();
    document.update(score_json(found.all));
    document["documents"] = json::array();
    for (const models::DocumentScore& part : found.documents) {
      json entry = score_json(part.score);
      entry["name"] = printable(part.name);
      document["documents"].push_back(std::move(entry));
    }
    fmt::print("{}\n", document.dump(2));
    return kFine;
  }
  fmt::print("\n{:<32} {:>10} {:>10} {:>10} {:>10}\n", "document", "tokens", "nats/token",
             "perplexity", "accuracy");
  for (const models::DocumentScore& part : found.documents) print_score(part.name, part.score);
  if (found.documents.size() > 1) print_score("all", found.all);
  return kFine;
}

}  // namespace switchyard::tool
