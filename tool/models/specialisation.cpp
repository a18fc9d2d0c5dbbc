#include "tool/models/specialisation.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "bench/measure/results.hpp"
#include "checkpoint/file_names.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/printable.hpp"
#include "models/training/run_directory.hpp"
#include "switchyard/models/files.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/progress.hpp"
#include "tool/run/routing_stats.hpp"

namespace switchyard::tool {
namespace {

namespace fs = std::filesystem;
using models::LayerSpecialisation;
using models::TextRouting;
using nlohmann::json;

bool is_same(const fs::path& a, const fs::path& b) {
  std::error_code none;
  return fs::equivalent(a, b, none);
}

/// What decides a forward, as config.json has it: losses and capacities of a training do not.
json forward_of(models::ModelConfig config) {
  config.losses = {};
  config.capacity_factor.reset();
  config.drop_policy = {};
  json whole = json::parse(models::to_json(config));
  for (const char* key : {"architectures", "model_type"}) whole.erase(key);  // follow from the rest
  return whole.flatten();
}

/// @throws UsageError: its values mean something else in the model of `directory`.
void check_same_model(const fs::path& path, const fs::path& directory) {
  const json there = forward_of(models::read_model_config(path));
  const json here = forward_of(models::read_model_config(directory));
  const auto at = [](const json& config, const std::string& key) {
    return config.contains(key) ? config[key].dump() : std::string("nothing");
  };
  json keys = here;
  keys.update(there);
  for (const auto& [key, value] : keys.items()) {
    if (at(there, key) == at(here, key)) continue;
    throw UsageError("--against: {} has {} {}, but the evaluated model {}: want the same model",
                     printable(path.string()), key.substr(1), at(there, key), at(here, key));
  }
  const auto tokenizer = models::find_tokenizer(path), own = models::find_tokenizer(directory);
  if ((tokenizer == nullptr) != (own == nullptr) ||
      (own != nullptr && own->file() != tokenizer->file())) {
    throw UsageError("--against: {} has another tokenizer than the evaluated model",
                     printable(path.string()));
  }
}

/// Those of a run before the one that is evaluated, if that is one of them.
std::vector<fs::path> of_run(const fs::path& run, const fs::path& directory) {
  std::vector<fs::path> found;
  for (const std::int64_t step : models::checkpoint_steps(run)) {
    const fs::path checkpoint = run / models::checkpoint_name(step);
    if (is_same(checkpoint, directory)) break;
    found.push_back(checkpoint);
  }
  if (found.empty()) {
    throw UsageError(
        "--against: {} has no checkpoint before {}, want one of a run with more: train "
        "--save-every",
        printable(run.string()), printable(directory.filename().string()));
  }
  return found;
}

bool has_parameters(const models::Model& model) {
  const auto is_router = [](const auto& tensor) {
    return tensor.name.find(".mlp.gate.") != std::string::npos;
  };
  const auto any = [&](const auto& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), is_router);
  };
  return any(model.parameters()) || any(model.buffers());
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::string percents(const std::vector<double>& shares) {
  std::string words;
  for (const double share : shares) words += fmt::format(" {:.1f}%", 100 * share);
  return words;
}

json layer_json(const LayerSpecialisation& of) {
  json layer = {{"counts", of.counts},
                {"load", bench::load_json(of.load)},
                {"token_type", information_json(of.token_type)}};
  if (of.document) layer["document"] = information_json(*of.document);
  return layer;
}

}  // namespace

std::vector<fs::path> checkpoints_beside(const Options& options, const fs::path& directory) {
  if (!options.against.empty() && !options.specialisation) {
    throw UsageError("--against: {} is compared by --specialisation, want both",
                     printable(options.against.front()));
  }
  std::vector<fs::path> found;
  for (const std::string& given : options.against) {
    const fs::path path = models::model_directory(given);  // that there is one at all
    const bool is_run = kind_of(fs::path(given) / kConfigFile) != FileKind::kFile;
    const std::vector<fs::path> some =
        is_run ? of_run(given, directory) : std::vector<fs::path>{path};
    for (const fs::path& checkpoint : some) {
      if (is_same(checkpoint, directory)) {
        throw UsageError("--against: {} is what is evaluated, want another checkpoint",
                         printable(checkpoint.string()));
      }
      check_same_model(checkpoint, directory);
      found.push_back(checkpoint);
    }
  }
  return found;
}

SpecialisationFindings find_specialisation(const Options& options, const fs::path& directory,
                                           const std::vector<fs::path>& beside,
                                           models::Model& model, const models::Text& text) {
  const auto seed = static_cast<std::uint64_t>(options.seed);
  const std::optional<models::CheckpointOrigin> origin = models::read_origin(directory);
  const bool with_untrained = origin && has_parameters(model);
  const double passes = 1.0 + (with_untrained ? 1.0 : 0.0) + static_cast<double>(beside.size());
  double done = 0;
  LoadBar bar("percent of what routers read");
  models::TextRoutingOptions how;
  how.max_tokens = options.max_tokens.value_or(how.max_tokens);
  how.progress = [&](double share) { bar.show((done + share) / passes); };
  const auto route = [&] {
    TextRouting routing = models::route_text(model, text, how);
    ++done;
    return routing;
  };

  SpecialisationFindings found;
  const TextRouting own = route();
  found.tokens = own.num_tokens();
  if (with_untrained) {
    model.reset_routers(origin->seed);
    const TextRouting untrained = route();
    found.untrained = models::specialisation(untrained, 100, seed);
    found.untrained_seed = origin->seed;
    found.untrained_words = fmt::format(
        "the same model with its routers at the values that a run of seed {} begins with{}",
        origin->seed,
        origin->has_init ? " (this one began with another's weights, train --init)" : "");
  } else {
    found.untrained_words =
        origin ? "the router has no parameters"
               : "its seed is not known, the checkpoint has no optimizer.safetensors";
  }
  std::vector<TextRouting> others;
  for (const fs::path& checkpoint : beside) {
    models::load_parameters(model, checkpoint);
    others.push_back(route());
    CheckpointBeside entry{.name = checkpoint.string()};
    if (const auto of = models::read_origin(checkpoint)) entry.step = of->step;
    entry.saturation = models::saturation(others.back(), own);
    found.checkpoints.push_back(std::move(entry));
  }
  for (std::size_t i = 0; i < others.size(); ++i) {
    found.checkpoints[i].churn =
        models::churn(others[i], i + 1 < others.size() ? others[i + 1] : own);
  }
  bar.clear();
  if (with_untrained || !beside.empty()) models::load_parameters(model, directory);
  found.layers = models::specialisation(own, 100, seed);
  return found;
}

json to_json(const SpecialisationFindings& found) {
  json layers = json::array();
  for (std::size_t l = 0; l < found.layers.size(); ++l) {
    const LayerSpecialisation& of = found.layers[l];
    json layer = layer_json(of);
    layer["layer"] = of.layer;
    layer["coactivation"] =
        coactivation_json(of.coactivation, static_cast<std::int32_t>(of.counts.size()));
    layer["untrained"] = found.untrained.empty() ? json() : layer_json(found.untrained[l]);
    layers.push_back(std::move(layer));
  }
  json checkpoints = json::array();
  for (const CheckpointBeside& of : found.checkpoints) {
    checkpoints.push_back({{"path", printable(of.name)},
                           {"step", of.step ? json(*of.step) : json()},
                           {"saturation", of.saturation},
                           {"churn", of.churn}});
  }
  return {{"tokens", found.tokens},
          {"untrained_seed", found.untrained_seed ? json(*found.untrained_seed) : json()},
          {"layers", std::move(layers)},
          {"checkpoints", std::move(checkpoints)}};
}

void print(const SpecialisationFindings& found) {
  fmt::print(
      "\nspecialisation on {} tokens (docs/metrics.md): nats that a token's id tells of its "
      "experts\n{:>5} {:>9} {:>9} {:>9} {:>5} {:>9}{} {:>8} {:>8}  {}\n",
      found.tokens, "layer", "MI", "corrected", "by chance", "p", "untrained",
      found.layers.front().document ? fmt::format(" {:>9}", "document") : "", "load CV", "random",
      "chosen together");
  for (std::size_t l = 0; l < found.layers.size(); ++l) {
    const LayerSpecialisation& of = found.layers[l];
    const metrics::Information& type = of.token_type;
    const auto pairs =
        strongest_pairs(of.coactivation, static_cast<std::int32_t>(of.counts.size()));
    fmt::print(
        "{:>5} {:>9.4f} {:>9.4f} {:>9.4f} {:>5.2f} {:>9}{} {:>8.3f} {:>8.3f}  {}\n", of.layer,
        type.plug_in, type.corrected, type.null_mean.value_or(0), type.p.value_or(1),
        found.untrained.empty() ? "-"
                                : fmt::format("{:.4f}", found.untrained[l].token_type.corrected),
        of.document ? fmt::format(" {:>9.4f}", of.document->corrected) : "", of.load.cv,
        of.load.cv_floor, pairs.empty() ? "-" : fmt::format("{}", fmt::join(pairs, ", ")));
  }
  fmt::print("untrained, corrected too: {}\n", found.untrained_words);
  if (found.checkpoints.empty()) return;
  fmt::print(
      "\nsaturation: share of the experts that a checkpoint had chosen already; churn: to "
      "the next one\n");
  for (const CheckpointBeside& of : found.checkpoints) {
    fmt::print("{:<32} saturation {:.1f}% (layers{}), churn {:.1f}%\n", printable(of.name, 80),
               100 * mean(of.saturation), percents(of.saturation), 100 * mean(of.churn));
  }
}

}  // namespace switchyard::tool
