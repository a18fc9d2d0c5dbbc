// `switchyard evaluate`: a trained model on held-out text.
#include "switchyard/models/evaluate.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/printable.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/ngrams.hpp"
#include "tool/commands.hpp"
#include "tool/models/ablation.hpp"
#include "tool/models/attribution.hpp"
#include "tool/models/common.hpp"
#include "tool/models/released.hpp"
#include "tool/models/specialisation.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/progress.hpp"

namespace switchyard::tool {
namespace {

using models::LeakProbe;
using models::Score;
using nlohmann::json;

json score_json(const Score& score) {
  return {{"bytes", score.bytes},
          {"tokens", score.targets},
          {"nats_per_byte", score.nats_per_byte()},
          {"bits_per_byte", score.bits_per_byte()},
          {"perplexity", score.perplexity()},
          {"accuracy", score.accuracy()}};
}

/// @param with_tokens  Where these are not the bytes.
void print_score(const std::string& name, const Score& score, bool with_tokens) {
  fmt::print("{:<32} {:>10}{} {:>10.4f} {:>10.4f} {:>10.3f} {:>9.1f}%\n", printable(name, 80),
             score.bytes, with_tokens ? fmt::format(" {:>10}", score.targets) : "",
             score.nats_per_byte(), score.bits_per_byte(), score.perplexity(),
             100 * score.accuracy());
}

/// What was found, in the order in which it is said.
struct Findings {
  models::Evaluation evaluation{};
  std::vector<double> floors{};
  std::vector<LeakProbe> leaks{};
  std::optional<SpecialisationFindings> specialisation{};
  std::optional<models::Ablations> ablations{};
  models::AblationCost ablation_cost{};
  std::optional<AttributionFindings> attribution{};
  bool causal_router = true;
  bool are_bytes = true;
  bool has_capacity = false;  ///< Whether the model was trained with one.

  [[nodiscard]] bool leaked() const {
    return std::any_of(leaks.begin(), leaks.end(), [](const LeakProbe& p) { return !p.same; });
  }
};

json json_of(const Findings& found, json document) {
  document.update(score_json(found.evaluation.all));
  document["documents"] = json::array();
  for (const models::DocumentScore& part : found.evaluation.documents) {
    json entry = score_json(part.score);
    entry["name"] = printable(part.name);
    document["documents"].push_back(std::move(entry));
  }
  const auto& at_capacity = found.evaluation.at_capacity;
  document["drop"] = at_capacity          ? json(at_capacity->drop)
                     : found.has_capacity ? json()
                                          : json(0.0);
  if (at_capacity) document["nats_per_byte_at_capacity"] = at_capacity->nats_per_byte;
  document["causal"] = found.causal_router;
  if (!found.floors.empty()) document["floors"] = found.floors;
  if (!found.leaks.empty()) {
    document["leaks"] = json::array();
    for (const LeakProbe& probe : found.leaks) {
      document["leaks"].push_back({{"replaced", models::to_string(probe.replaced)},
                                   {"position", probe.position},
                                   {"same", probe.same},
                                   {"largest_change", probe.largest_change}});
    }
  }
  if (found.specialisation) document["specialisation"] = to_json(*found.specialisation);
  if (found.ablations) document["ablations"] = to_json(*found.ablations, found.ablation_cost);
  if (found.attribution) document["attribution"] = to_json(*found.attribution);
  return document;
}

void print(const Findings& found) {
  const models::Evaluation& evaluation = found.evaluation;
  const bool with_tokens = !found.are_bytes;
  fmt::print("\n{:<32} {:>10}{} {:>10} {:>10} {:>10} {:>10}\n", "document", "bytes",
             with_tokens ? fmt::format(" {:>10}", "tokens") : "", "nats/byte", "bits/byte",
             "perplexity", "accuracy");
  for (const models::DocumentScore& part : evaluation.documents) {
    print_score(part.name, part.score, with_tokens);
  }
  if (evaluation.documents.size() > 1) print_score("all", evaluation.all, with_tokens);
  if (const auto& at = evaluation.at_capacity) {
    fmt::print("\nwith the capacity of training: {:.4f} nats/byte, {:.2f}% dropped\n",
               at->nats_per_byte, 100 * at->drop);
  }
  if (!found.causal_router) {
    fmt::print(
        "\nthe router is not causal: a token's experts depend on later tokens, so these "
        "losses are none that a text can be continued with\n");
  }
  if (!found.floors.empty()) {
    fmt::print("\nbyte n-grams, nats/byte:");
    for (std::size_t i = 0; i < found.floors.size(); ++i) {
      fmt::print("{} order {}: {:.4f}", i == 0 ? "" : ",", i + 1, found.floors[i]);
    }
    const double best = *std::min_element(found.floors.begin(), found.floors.end());
    const double loss = evaluation.all.nats_per_byte();
    fmt::print("\nthe model is {:.4f} {} the best of them\n", std::abs(loss - best),
               loss < best ? "below" : "above");
  }
  if (!found.leaks.empty()) fmt::print("\n");
  for (const LeakProbe& probe : found.leaks) {
    fmt::print("{} replaced, logits up to position {}: {}\n", models::to_string(probe.replaced),
               probe.position,
               probe.same ? "the same bits"
                          : fmt::format("changed by up to {:.3g}", probe.largest_change));
  }
  if (!found.leaks.empty()) fmt::print("leak audit: {}\n", found.leaked() ? "LEAKS" : "holds");
}

/// @throws UsageError: counts of what is evaluated are no floor of it.
void check_floors(const Options& options) {
  const std::string both = common_file(options.ngram_floor, options.texts);
  if (both.empty()) return;
  throw UsageError(
      "--ngram-floor: {} is evaluated, and n-grams counted on it know it by heart: want the text "
      "that the model was trained on",
      both);
}

/// @throws UsageError: an option without that which it is of; what a GPU does not do.
void check_routing_options(const Options& options, const std::filesystem::path& directory) {
  const bool any = options.specialisation || !options.ablate.empty();
  if (options.max_tokens && !any) {
    throw UsageError("--max-tokens: {} tokens of --specialisation or --ablate, want one of these",
                     *options.max_tokens);
  }
  if (!any) return;
  const char* const option = options.specialisation ? "--specialisation" : "--ablate";
  if (options.backend == "cuda") {
    throw UsageError("{}: routing is read on a CPU so far, want --backend cpu, not cuda", option);
  }
  const models::ModelConfig config = models::read_model_config(directory);
  if (config.first_dense == config.layers) {
    throw UsageError("{}: all {} layers of {} are dense, want a model with MoE layers", option,
                     config.layers, printable(directory.string()));
  }
}

}  // namespace

int evaluate_command(const Options& options) {
  check_place(options);
  check_floors(options);
  const std::filesystem::path directory = models::model_directory(options.model_directory);
  if (models::is_released(directory)) return evaluate_released(options, directory);
  if (options.ids) {
    throw UsageError("--ids: models that train has written take text: --text without it");
  }
  const models::ModelConfig config = models::read_model_config(directory);
  const auto tokenizer = models::tokenizer_of(directory, config.vocabulary);
  if (!tokenizer) {
    throw UsageError(
        "--model: {} has a vocabulary of {} and no tokenizer.model, want {}: tokens are bytes",
        options.model_directory, config.vocabulary, models::kByteVocabulary);
  }
  check_routing_options(options, directory);
  const std::vector<std::filesystem::path> beside = checkpoints_beside(options, directory);
  const std::optional<AttributionTexts> sources = open_sources(options, config, tokenizer);
  const models::Text text = open_text("--text", options.texts, tokenizer);
  std::optional<models::Text> counted;
  if (!options.ngram_floor.empty()) {
    counted.emplace(open_text("--ngram-floor", options.ngram_floor));
  }
  models::Model model = open_model(options, directory);
  if (!options.json) {
    fmt::print("{}: {}\n", printable(directory.string()), words_of(model.config()));
  }
  Findings found;
  found.causal_router = models::has_causal_router(model.config());
  found.are_bytes = tokenizer->is_bytes();
  found.has_capacity = model.config().capacity_factor.has_value();
  LoadBar bar("percent of the text");
  const auto begin = std::chrono::steady_clock::now();
  found.evaluation = models::evaluate(
      model, text, {.at_capacity = true, .progress = [&](double share) { bar.show(share); }});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  bar.clear();
  if (counted)
    found.floors = models::witten_bell_floors(*counted, open_text("--text", options.texts));
  if (options.leak_audit) found.leaks = models::audit_leaks(model, text);
  if (options.specialisation) {
    found.specialisation = find_specialisation(options, directory, beside, model, text);
  }
  if (!options.ablate.empty()) {
    models::AblationOptions how = ablation_options(options);
    found.ablation_cost = models::count_ablations(model, text, how);
    if (!options.json) {
      announce(found.ablation_cost,
               static_cast<double>(found.evaluation.all.targets) / seconds.count());
    }
    LoadBar passes("percent of the ablations");
    how.progress = [&](double share) { passes.show(share); };
    found.ablations = models::ablate(model, text, how);
    passes.clear();
  }
  if (sources) found.attribution = find_attribution(options, *sources, model);
  if (options.json) {
    json document = start_document(options);
    document["checkpoint"] = printable(directory.string());
    document["model"] = json_of(model.config());
    fmt::print("{}\n", json_of(found, std::move(document)).dump(2));
  } else {
    print(found);
    if (found.specialisation) print(*found.specialisation);
    if (found.ablations) print(*found.ablations, ablation_options(options));
    if (found.attribution) print(*found.attribution);
  }
  return found.leaked() ? kCheckFailed : kFine;
}

}  // namespace switchyard::tool
