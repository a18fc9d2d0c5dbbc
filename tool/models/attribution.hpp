#pragma once

// `evaluate --sources`: which text a passage is from, by the model's likelihood behind excerpts.

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/models/attribution.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// What is read, a text of each file.
struct AttributionTexts {
  std::vector<models::Text> held_out{}, sources{};  ///< [R].
  models::AttributionSizes sizes{};
  std::vector<models::Passage> passages{};
};

struct AttributionFindings {
  std::vector<std::string> names{};  ///< [R] files of --sources.
  std::string unit{};                ///< "bytes" or "tokens".
  models::AttributionSizes sizes{};
  models::Attribution model{};
  std::vector<models::Attribution> ngrams{};  ///< Orders 1, 2, ...
};

/// Nothing where there are no --sources.
/// @throws UsageError: --sources that do not go with --text or the model, a text that is too short;
/// --passages alone.
[[nodiscard]] std::optional<AttributionTexts> open_sources(
    const Options& options, const models::ModelConfig& config,
    const std::shared_ptr<const models::Tokenizer>& tokenizer);

[[nodiscard]] AttributionFindings find_attribution(const Options& options,
                                                   const AttributionTexts& texts,
                                                   models::Model& model);

[[nodiscard]] nlohmann::json to_json(const AttributionFindings& found);
void print(const AttributionFindings& found);

}  // namespace switchyard::tool
