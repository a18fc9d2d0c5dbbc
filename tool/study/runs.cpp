#include "tool/study/runs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>

#include "checkpoint/files/json.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "core/printable.hpp"
#include "models/training/run_directory.hpp"
#include "models/training/run_state.hpp"
#include "switchyard/models/evaluate.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/specialisation.hpp"
#include "tool/models/train_setup.hpp"
#include "tool/options/usage_error.hpp"

namespace switchyard::tool {
namespace {

using models::TrainConfig;
using models::TrainResult;
using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::int64_t kBlock = 1024;  // bytes of a block of the bootstrap, at least
constexpr std::int64_t kMostBlocks = 1024;
constexpr std::int64_t kRoutedTokens = 4096;  // held out, of which the routers' information is told
constexpr int kPermutations = 20;
constexpr const char* kInformation = "information";
constexpr const char* kNull = "information_null";

json number(double value) { return std::isfinite(value) ? json(value) : json(); }

/// Windows of a document that follow each other, as blocks of some thousand bytes.
json blocks_of(const models::Evaluation& evaluation) {
  const std::int64_t least = std::max(kBlock, evaluation.all.targets / kMostBlocks);
  json blocks = json::array();
  models::Score block;
  std::int64_t document = -1;
  const auto end_block = [&] {
    if (block.targets > 0) blocks.push_back({block.targets, block.nats});
    block = {};
  };
  for (const models::WindowScore& window : evaluation.windows) {
    if (window.window.document != document || block.targets >= least) end_block();
    document = window.window.document;
    block.add(window.score);
  }
  end_block();
  return blocks;
}

/// What the log says: means between losses on held-out text, and how long steps took.
struct LogSummary {
  json curve = json::array();
  std::vector<double> step_us{};
};

LogSummary read_log(const fs::path& path, double tokens_per_step) {
  LogSummary summary;
  std::istringstream lines(read_text(path));
  static constexpr const char* kMeans[] = {"loss", "load_cv", "max_vio", "picks", "dropped"};
  std::map<std::string, std::pair<double, int>> sums;
  double seconds = 0;
  for (std::string text; std::getline(lines, text);) {
    const json line = parse_json(text, path.string());
    for (const char* key : kMeans) {
      if (!line.contains(key) || !line[key].is_number()) continue;
      sums[key].first += line[key].get<double>();
      sums[key].second += 1;
    }
    if (line.at("tokens_per_s").is_number()) {
      seconds += tokens_per_step / line["tokens_per_s"].get<double>();
      summary.step_us.push_back(tokens_per_step / line["tokens_per_s"].get<double>() * 1e6);
    }
    if (!line.contains("valid_loss")) continue;
    json point = {
        {"step", line.at("step")}, {"seconds", seconds}, {"valid_loss", line["valid_loss"]}};
    for (const char* key : kMeans) {
      const auto [sum, count] = sums[key];
      point[key] = count > 0 ? json(sum / count) : json();
    }
    for (const char* key : {kInformation, kNull}) point[key] = line.value(key, json());
    sums.clear();
    summary.curve.push_back(std::move(point));
  }
  return summary;
}

/// Whether experts are chosen at all.
bool has_routers(const models::ModelConfig& config) {
  return config.first_dense < config.layers && !models::soft_moe_config(config);
}

/// What a token tells of its experts, nats: MI(token; expert) less its bias, and that of permuted
/// tokens, means over the MoE layers. Of a model on a CPU.
std::map<std::string, double> information_of(models::Model& model, const models::Text& text,
                                             std::int64_t sequences) {
  const models::TextRouting routing =
      models::route_text(model, text, {.max_tokens = kRoutedTokens, .sequences = sequences});
  std::map<std::string, double> means;
  for (const models::LayerSpecialisation& of : models::specialisation(routing, kPermutations)) {
    const double share = 1.0 / static_cast<double>(routing.layers.size());
    means[kInformation] += share * of.token_type.corrected;
    means[kNull] += share * (of.token_type.null_mean.value_or(0) - of.token_type.bias);
  }
  return means;
}

json leaks_of(models::Model& model, const models::Text& text) {
  json leaks = json::object();
  for (const models::LeakProbe& probe : models::audit_leaks(model, text)) {
    const double before = leaks.value(models::to_string(probe.replaced), 0.0);
    const double change = probe.same ? 0 : std::max(probe.largest_change, 1e-30);
    leaks[models::to_string(probe.replaced)] = std::max(before, change);
  }
  return leaks;
}

bool has_diverged(const json& result) { return !result.value("diverged", json()).is_null(); }

/// What the trainer is told, with where the run begins. A run that diverged has left no weights.
TrainConfig config_of(const StudyPlace& place, const StudyRun& run) {
  TrainConfig config = train_config(place.study, run);
  const auto from = init_run(place.study, run, place.results);
  if (!from) return config;
  const std::string name = name_of(place.study, *from);
  const auto found = place.results.find(name);
  if (found == place.results.end() || !has_diverged(found->second)) {
    config.init = place.directory / name;
  }
  return config;
}

/// Trains. What begins with a run that diverged has diverged with it.
TrainResult train_run(const StudyPlace& place, const StudyRun& run, const TrainSetup& setup) {
  if (const auto from = init_run(place.study, run, place.results)) {
    const std::string name = name_of(place.study, *from);
    const auto found = place.results.find(name);
    if (found == place.results.end()) {
      throw UsageError("{} begins with {}, which is not done: --only wants '{}' too",
                       name_of(place.study, run), name, place.study.arms[from->arm].name);
    }
    if (has_diverged(found->second)) {
      fs::create_directories(setup.options.directory);
      TrainResult result;
      result.end = TrainResult::End::kNotFinite;
      result.not_finite =
          models::NotFinite{0, -1, "loss", {"it begins with " + name + ", which diverged", 0, NAN}};
      return result;
    }
    if (models::checkpoint_steps(place.directory / name).empty()) {
      throw UsageError(
          "{} begins with {}, whose weights went when no arm began with it: remove that run to "
          "have "
          "it trained again",
          name_of(place.study, run), (place.directory / name).string());
    }
  }
  const bool is_test = run.kind != RunKind::kTune;
  return models::train(setup.config, place.text, is_test ? &place.valid : nullptr, setup.options);
}

json setting_of(const StudyPlace& place, const TrainConfig& config) {
  json setting = models::run_json(config, place.text);
  if (place.backend != Backend::kCpu) setting["backend"] = to_string(place.backend);
  setting["valid"] = {{"bytes", place.valid.num_bytes()},
                      {"fingerprint", place.valid.fingerprint()}};
  return setting;
}

/// What the routers of the last step's model have come to, beside ones that never learnt. On a CPU,
/// wherever the run was.
json information_json(const StudyPlace& place, const TrainConfig& config,
                      const fs::path& checkpoint) {
  models::Model model = models::load_model(checkpoint, {.num_threads = place.num_threads});
  const std::int64_t sequences = config.sequences / config.accumulate;
  const auto trained = information_of(model, place.valid, sequences);
  model.reset_routers(config.seed);
  const auto untrained = information_of(model, place.valid, sequences);
  return {{"trained", trained.at(kInformation)},
          {"null", trained.at(kNull)},
          {"untrained", untrained.at(kInformation)}};
}

/// What the model of the last step does on held-out text.
void evaluate_run(const StudyPlace& place, const StudyRun& run, const TrainConfig& config,
                  const fs::path& checkpoint, json& line) {
  models::Model model = models::load_model(
      checkpoint,
      {.backend = place.backend, .num_threads = place.num_threads, .compute = config.compute});
  const bool is_test = run.kind != RunKind::kTune;
  const models::Evaluation found =
      models::evaluate(model, place.valid,
                       {.sequences = config.sequences / config.accumulate, .at_capacity = is_test});
  line["loss"] = number(found.all.nats_per_byte());
  line["accuracy"] = found.all.accuracy();
  if (!is_test) return;
  line["blocks"] = blocks_of(found);
  if (found.at_capacity) {
    line["at_capacity"] = {{"loss", number(found.at_capacity->nats_per_byte)},
                           {"dropped", found.at_capacity->drop}};
  }
  line["leaks"] = leaks_of(model, place.valid);
  line[kInformation] = json();
  if (has_routers(config.model)) line[kInformation] = information_json(place, config, checkpoint);
  line["causal"] = models::has_causal_router(config.model);
}

}  // namespace

void check_same(const StudyPlace& place, const StudyRun& run, const json& result) {
  const json wanted = setting_of(place, config_of(place, run)).flatten();
  const json found = result.at("setting").flatten();
  for (const json* one : {&wanted, &found}) {
    for (const auto& member : one->items()) {
      const std::string& key = member.key();
      const bool same = wanted.contains(key) && found.contains(key) && wanted[key] == found[key];
      if (same) continue;
      const auto text = [&](const json& from) {
        return from.contains(key) ? from[key].dump() : "nothing of that name";
      };
      throw UsageError(
          "--output: {} is of another study: {} is {} there and {} here; take another directory, "
          "or "
          "remove that run",
          (place.directory / name_of(place.study, run)).string(), key.substr(1), text(found),
          text(wanted));
    }
  }
}

namespace {

/// What do_run() has put in: a loss, or why there is none.
bool has_measured(const json& result) {
  const auto member = [&](const char* name) { return result.value(name, json()); };
  const std::string kind = member("kind").is_string() ? member("kind").get<std::string>() : "";
  constexpr RunKind kKinds[] = {RunKind::kTune, RunKind::kTest, RunKind::kTime};
  const bool is_kind = std::any_of(std::begin(kKinds), std::end(kKinds),
                                   [&](RunKind of) { return kind == to_string(of); });
  return is_kind && member("seed").is_number_integer() && member("curve").is_array() &&
         result.contains("diverged") &&
         (member("diverged").is_null() ? member("loss").is_number()
                                       : member("diverged").is_string());
}

}  // namespace

RunResults read_runs(const StudyPlace& place) {
  RunResults results;
  for (const StudyArm& arm : place.study.arms) {
    std::error_code none;
    for (fs::directory_iterator entry(place.directory / arm.name, none), end; !none && entry != end;
         entry.increment(none)) {
      const fs::path file = entry->path() / kRunFile;
      if (kind_of(file) != FileKind::kFile) continue;
      json result = parse_json(read_text(file), file.string());
      const std::string name = arm.name + "/" + entry->path().filename().string();
      const bool is_ours = result.is_object() && result.value("run", json()) == name &&
                           result.contains("loss") && result.contains("setting") &&
                           result.contains("learning_rate") && result.contains("steps") &&
                           result.contains("tokens_per_s") && result.contains("seconds") &&
                           result["learning_rate"].is_number() && result["steps"].is_number() &&
                           result["setting"].is_object() && has_measured(result);
      if (!is_ours) throw UsageError("--output: {} is no result of a run", file.string());
      results.emplace(name, std::move(result));
    }
  }
  return results;
}

void drop_weights(const StudyPlace& place, const std::string& name, const json& result) {
  const StudyConfig& study = place.study;
  const bool is_begun_with =
      std::any_of(study.arms.begin(), study.arms.end(), [&](const StudyArm& arm) {
        return arm.init && name.starts_with(study.arms[*arm.init].name + "/");
      });
  if (is_begun_with || result.at("kind") != to_string(RunKind::kTune)) return;
  const fs::path run = place.directory / name;
  for (const std::int64_t step : models::checkpoint_steps(run)) {
    fs::remove_all(run / models::checkpoint_name(step));
  }
}

std::optional<json> do_run(const StudyPlace& place, const StudyRun& run, const RunCalls& calls) {
  const bool is_test = run.kind != RunKind::kTune;
  const std::string name = name_of(place.study, run);
  TrainSetup setup{.name = place.study.name, .config = config_of(place, run)};
  setup.options = {.backend = place.backend,
                   .directory = place.directory / name,
                   .resume = true,
                   .save_every = place.study.save_every,
                   .keep = 1,
                   .valid_every = is_test ? place.study.valid_every : 0,
                   .num_threads = place.num_threads,
                   .peak_flops = place.limits.flops(setup.config.compute),
                   .on_step = calls.on_step,
                   .stop = calls.stop};
  const TrainConfig& config = setup.config;
  if (is_test && place.backend == Backend::kCpu && has_routers(config.model)) {
    setup.options.measure = [&](models::Model& model) {
      return information_of(model, place.valid, config.sequences / config.accumulate);
    };
  }
  TrainOutcome outcome;
  outcome.result = train_run(place, run, setup);
  if (outcome.result.end == TrainResult::End::kInterrupted) return std::nullopt;
  const auto tokens = static_cast<double>(config.sequences * config.model.sequence);
  const fs::path log_file = setup.options.directory / "log.jsonl";
  LogSummary log;
  if (kind_of(log_file) == FileKind::kFile) log = read_log(log_file, tokens);
  outcome.step_us = log.step_us.empty() ? std::vector<double>{0} : log.step_us;
  outcome.estimate = models::estimate_training(
      config, run.steps, place.limits.flops_of_models(config.compute, place.backend),
      place.limits.bandwidth, {.backend = place.backend});
  double seconds = 0;
  for (const double us : log.step_us) seconds += us * 1e-6;
  outcome.result.seconds = seconds;
  outcome.result.first_step = 0;

  json line = train_line(setup, outcome, place.machine, place.limits);
  line["suite"] = "study";
  line["study"] = place.study.name;
  line["run"] = name;
  line["arm"] = place.study.arms[run.arm].name;
  line["kind"] = to_string(run.kind);
  line["learning_rate"] = run.rate;
  line["setting"] = setting_of(place, config);
  line["loss"] = json();
  line["diverged"] = json();
  line["seconds"] = seconds;
  line["step_us"] = bench::statistics(outcome.step_us).median;
  line["tokens_per_s"] =
      log.step_us.empty() ? json() : json(tokens / bench::statistics(log.step_us).median * 1e6);
  line["curve"] = std::move(log.curve);
  if (outcome.result.end == TrainResult::End::kNotFinite) {
    line["diverged"] = printable(outcome.result.not_finite->text());
  } else {
    evaluate_run(place, run, config, outcome.result.checkpoint, line);
    if (line["loss"].is_null()) line["diverged"] = "the loss on held-out text is not finite";
  }
  // Nobody will go on from here, but whoever was killed before there is a result.
  if (outcome.result.end == TrainResult::End::kFinished) {
    models::drop_moments(outcome.result.checkpoint);
  }
  write_text(setup.options.directory / kRunFile, line.dump() + "\n");
  drop_weights(place, name, line);
  return line;
}

double estimated_seconds(const StudyPlace& place, const StudyRun& run) {
  const TrainConfig config = train_config(place.study, run);
  const double peak = place.limits.flops_of_models(config.compute, place.backend);
  const bool is_test = run.kind != RunKind::kTune;
  const double times = is_test ? std::ceil(static_cast<double>(run.steps) /
                                           static_cast<double>(place.study.valid_every)) +
                                     1
                               : 1;
  const double evaluated = times * static_cast<double>(place.valid.num_targets()) *
                           models::count(config.model).forward_flops_per_token;
  return models::estimate_training(config, run.steps, peak, place.limits.bandwidth).seconds +
         evaluated / (models::kExpectedShare * peak);
}

}  // namespace switchyard::tool
