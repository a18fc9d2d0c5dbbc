#include "tool/models/attribution.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/measure/inference.hpp"
#include "core/printable.hpp"
#include "switchyard/models/evaluate.hpp"
#include "tool/models/common.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/progress.hpp"

namespace switchyard::tool {
namespace {

using models::Attribution;
using nlohmann::json;

/// A text of each file.
std::vector<models::Text> texts_of(const char* option, const std::vector<std::string>& files,
                                   const std::shared_ptr<const models::Tokenizer>& tokenizer) {
  std::vector<models::Text> texts;
  for (const std::string& file : files) texts.push_back(open_text(option, {file}, tokenizer));
  return texts;
}

double accuracy(const Attribution& of) {
  return static_cast<double>(of.correct()) / static_cast<double>(of.passages());
}

json accuracy_json(const Attribution& of) {
  const bench::Interval interval = bench::wilson_interval(of.correct(), of.passages());
  return {{"correct", of.correct()},
          {"accuracy", accuracy(of)},
          {"low", interval.low},
          {"high", interval.high}};
}

std::string accuracy_words(const Attribution& of) {
  const bench::Interval interval = bench::wilson_interval(of.correct(), of.passages());
  return fmt::format("{:5.1f}% (95%: {:.1f} to {:.1f})", 100 * accuracy(of), 100 * interval.low,
                     100 * interval.high);
}

std::int64_t entry(const Attribution& of, std::int64_t row, std::int64_t col) {
  return of.confusion[static_cast<std::size_t>(row * of.num_sources + col)];
}

/// What can be said before anything is read.
void check_sources(const Options& options, const models::ModelConfig& config) {
  if (options.sources.size() != options.texts.size() || options.sources.size() < 2) {
    throw UsageError("--sources: {} files for {} of --text, want as many, at least 2",
                     options.sources.size(), options.texts.size());
  }
  const std::string both = common_file(options.sources, options.texts);
  if (!both.empty()) {
    throw UsageError("--sources: {} is evaluated, want the text that it was held out of", both);
  }
  if (config.first_dense < config.layers && !models::has_causal_router(config)) {
    throw UsageError(
        "--sources: the router {} looks at later tokens, so that likelihoods of passages are none",
        config.router);
  }
  if (config.sequence < 2) {
    throw UsageError("--sources: the model has {} position, want 2 and more", config.sequence);
  }
}

/// @throws UsageError: a text has no document of `length`.
void check_lengths(const char* option, const std::vector<std::string>& files,
                   const std::vector<models::Text>& texts, std::int64_t length) {
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::int64_t longest = texts[i].longest() + 1;
    if (longest >= length) continue;
    throw UsageError("{}: {} has documents of up to {} {}, want one of at least {} {}", option,
                     printable(files[i]), longest, texts[i].unit(), length, texts[i].unit());
  }
}

}  // namespace

std::optional<AttributionTexts> open_sources(
    const Options& options, const models::ModelConfig& config,
    const std::shared_ptr<const models::Tokenizer>& tokenizer) {
  if (options.sources.empty()) {
    if (options.passages) {
      throw UsageError("--passages: {} of each of --sources, want these too", *options.passages);
    }
    return std::nullopt;
  }
  check_sources(options, config);
  AttributionTexts texts{.held_out = texts_of("--text", options.texts, tokenizer),
                         .sources = texts_of("--sources", options.sources, tokenizer),
                         .sizes = models::attribution_sizes(config)};
  check_lengths("--text", options.texts, texts.held_out, texts.sizes.passage);
  check_lengths("--sources", options.sources, texts.sources, texts.sizes.excerpt);
  texts.passages =
      models::passages_of(texts.held_out, texts.sizes.passage, options.passages.value_or(64));
  return texts;
}

AttributionFindings find_attribution(const Options& options, const AttributionTexts& texts,
                                     models::Model& model) {
  AttributionFindings found{
      .names = options.sources, .unit = texts.sources.front().unit(), .sizes = texts.sizes};
  models::AttributionOptions how{.seed = static_cast<std::uint64_t>(options.seed)};
  if (!options.json) {
    fmt::print("attribution: {} sequences of {} {}\n", texts.passages.size() * texts.sources.size(),
               model.config().sequence, found.unit);
    std::fflush(stdout);
  }
  LoadBar bar("percent of the passages");
  how.progress = [&](double share) { bar.show(share); };
  found.model = models::attribute(model, texts.sources, texts.held_out, texts.passages, how);
  bar.clear();
  const std::vector<models::Text> bytes = texts_of("--sources", options.sources, nullptr);
  found.ngrams =
      models::attribute_by_ngrams(bytes, texts.held_out, texts.passages, texts.sizes.passage);
  return found;
}

json to_json(const AttributionFindings& found) {
  const std::int64_t size = found.model.num_sources;
  json out = accuracy_json(found.model);
  out["passages"] = found.model.passages() / size;
  out["passage"] = found.sizes.passage;
  out["excerpt"] = found.sizes.excerpt;
  out["chance"] = 1.0 / static_cast<double>(size);
  out["sources"] = json::array();
  for (std::int64_t i = 0; i < size; ++i) {
    std::vector<std::int64_t> row;
    for (std::int64_t j = 0; j < size; ++j) row.push_back(entry(found.model, i, j));
    out["sources"].push_back(
        {{"name", printable(found.names[static_cast<std::size_t>(i)])}, {"taken_for", row}});
  }
  out["ngrams"] = json::array();
  for (const Attribution& of : found.ngrams) out["ngrams"].push_back(accuracy_json(of));
  return out;
}

void print(const AttributionFindings& found) {
  const Attribution& model = found.model;
  const std::int64_t size = model.num_sources;
  fmt::print(
      "\nwhich source a passage is from: {} of {} {} from each of {}, the model behind {} {} of "
      "each\nmodel    {}, chance {:.1f}%\n",
      model.passages() / size, found.sizes.passage, found.unit, size, found.sizes.excerpt,
      found.unit, accuracy_words(model), 100.0 / static_cast<double>(size));
  for (std::size_t i = 0; i < found.ngrams.size(); ++i) {
    fmt::print("{} {}  {}{}\n", "n-gram", i + 1, accuracy_words(found.ngrams[i]),
               i == 0 ? ", bytes counted in the whole of each source" : "");
  }
  for (std::int64_t i = 0; i < size; ++i) {
    fmt::print("{:<32} taken for", printable(found.names[static_cast<std::size_t>(i)], 80));
    for (std::int64_t j = 0; j < size; ++j) fmt::print(" {}", entry(model, i, j));
    fmt::print("\n");
  }
}

}  // namespace switchyard::tool
