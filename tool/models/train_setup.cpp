// From options to a run, and from a run to a line of results.
#include "tool/models/train_setup.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bench/measure/results.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/check.hpp"
#include "core/printable.hpp"
#include "models/training/run_directory.hpp"
#include "switchyard/error.hpp"
#include "switchyard/models/files.hpp"
#include "tool/models/common.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/output_files.hpp"

namespace switchyard::tool {
namespace {

/// Whether the model is that of --init: adapters learn beside it, and nobody says another.
bool is_of_init(const Options& options) {
  return !options.adapters.empty() && options.config.empty() && options.preset.empty();
}

/// The preset of --preset, or of nothing; a model of --config, or beside which adapters learn, with
/// numbers that any may have.
models::Preset base_of(const Options& options) {
  if (!options.adapters.empty() && options.init.empty()) {
    throw UsageError(
        "--adapters: {} learn beside a model that is there, want --init DIR, a run or a checkpoint",
        options.adapters);
  }
  const bool of_init = is_of_init(options);
  if (options.config.empty() && !of_init) {
    return models::find_preset(options.preset.empty() ? "smoke" : options.preset);
  }
  if (!options.preset.empty()) {
    throw UsageError("--preset and --config are both given, want one of them");
  }
  if (!options.steps) {
    throw UsageError("--steps is missing: a {} does not say how many",
                     of_init ? "model of --init" : "--config");
  }
  models::Preset base{};
  base.name = of_init ? options.init.c_str() : options.config.c_str();
  if (of_init) {
    base.model = models::read_model_config(models::model_directory(options.init));
    base.model.losses = {};  // they would move a router that is frozen
    base.model.adapters.reset();
  } else {
    base.model = models::parse_model_config(read_text(options.config), options.config);
  }
  base.sequences = 16;
  base.steps = *options.steps;
  base.warmup = base.steps / 10;
  base.learning_rate = 1e-3;
  return base;
}

/// takes_losses(). @throws UsageError: --router names none of a layer.
bool routes_by_logits(const models::ModelConfig& model) {
  try {
    return takes_losses(model);
  } catch (const Error& error) {
    throw UsageError("--router: {}", message_of(error));
  }
}

/// @throws UsageError: losses of a router that has none, in the words of the options.
void check_losses(const models::ModelConfig& model) {
  const bool routes = model.first_dense < model.layers;
  if (!routes || routes_by_logits(model) || !model.losses.any()) return;
  std::vector<std::string> wants;
  for (const auto& [option, value] :
       {std::pair{"--balance", model.losses.balance}, std::pair{"--z", model.losses.z}}) {
    if (value != 0) wants.push_back(fmt::format("{} 0 instead of {}", option, value));
  }
  for (const auto& [key, value] :
       {std::pair{"importance", model.losses.importance}, std::pair{"device", model.losses.device},
        std::pair{"communication", model.losses.communication},
        std::pair{"entropy", model.losses.entropy}}) {
    if (value != 0) wants.push_back(fmt::format("\"{}\" of --config 0 instead of {}", key, value));
  }
  throw UsageError(
      "--router: {} has no logit for each expert and no other, which losses are of: want {}",
      model.router, fmt::join(wants, " and "));
}

/// @throws UsageError: as parse_perft(), and what does not fit the model beside.
void add_adapters(const Options& options, models::ModelConfig& model) {
  if (options.adapters.empty()) return;
  try {
    const PerftConfig perft = parse_perft(
        options.adapters, {.hidden = model.hidden, .router = layer_config(model).router});
    model.adapters = models::AdapterConfig{.kind = perft.kind,
                                           .num_adapters = perft.num_adapters,
                                           .rank = perft.rank,
                                           .alpha = perft.alpha,
                                           .activation = perft.activation};
    if (perft.kind == PerftKind::kRouted) {
      model.adapters->top_k = perft.router.as_top_k().top_k;
      model.adapters->renormalize = perft.router.as_top_k().renormalize;
    }
    check(model);
  } catch (const Error& error) {
    throw UsageError("--adapters: {}", message_of(error));
  }
}

models::ModelConfig model_of(const Options& options, models::ModelConfig model) {
  if (!options.router.empty()) model.router = options.router;
  if (options.capacity_factor) model.capacity_factor = options.capacity_factor;
  if (options.balance) model.losses.balance = *options.balance;
  if (options.router_z) model.losses.z = *options.router_z;
  if (!options.drop_policy.empty()) {
    if (!model.capacity_factor) {
      throw UsageError(
          "--drop-policy: {} given, but nothing is dropped without --capacity-factor C",
          options.drop_policy);
    }
    model.drop_policy = enumerator_of<DropPolicy>(options.drop_policy);
  }
  check_losses(model);
  check(model);
  model.top_k = taken_top_k(model).value_or(model.top_k);
  add_adapters(options, model);
  return model;
}

models::Schedule schedule_of(const Options& options, const models::Preset& base) {
  models::Schedule schedule;
  schedule.kind = models::parse_schedule(options.schedule);
  schedule.peak = options.learning_rate.value_or(base.learning_rate);
  schedule.steps = options.steps.value_or(base.steps);
  // Of a run that is shorter than the preset's, a tenth, so that it does not end in its warm-up.
  const std::int64_t warmup =
      options.steps ? std::min(base.warmup, schedule.steps / 10) : base.warmup;
  schedule.warmup = options.warmup.value_or(warmup);
  const bool is_wsd = schedule.kind == models::Schedule::Kind::kWsd;
  if (options.decay && !is_wsd) {
    throw UsageError("--decay: given, but --schedule {} has none, want wsd", options.schedule);
  }
  if (is_wsd)
    schedule.decay = options.decay.value_or(std::max<std::int64_t>(1, schedule.steps / 10));
  return schedule;
}

/// Of the newest checkpoint of the run that goes on; null: there is none, or its tokens are bytes.
std::shared_ptr<const models::Tokenizer> resumed_tokenizer(const Options& options) {
  const std::filesystem::path run = options.output_directory;
  if (!options.resume || models::checkpoint_steps(run).empty()) return nullptr;
  return models::find_tokenizer(models::model_directory(run));
}

/// --tokenizer; without it that of the run, which says of itself what it had, or of what it begins
/// with; else bytes.
std::shared_ptr<const models::Tokenizer> tokenizer_of(const Options& options) {
  std::shared_ptr<const models::Tokenizer> chosen;
  if (options.tokenizer.empty()) {
    chosen = resumed_tokenizer(options);
  } else {
    chosen = models::load_tokenizer(options.tokenizer);
  }
  if (!options.init.empty()) {
    const auto of_init = models::find_tokenizer(models::model_directory(options.init));
    if (chosen && of_init && chosen->file() != of_init->file()) {
      throw UsageError("--init: {} has another tokenizer than {}: its weights mean other tokens",
                       options.init,
                       options.tokenizer.empty() ? "the run" : "--tokenizer " + options.tokenizer);
    }
    if (!chosen) chosen = of_init;
  }
  return chosen ? chosen : models::byte_tokenizer();
}

/// @throws UsageError: no directory can be there, or it is another run's, which this one would have
/// to go on with.
void check_run_place(const Options& options) {
  std::error_code none;
  if (std::filesystem::exists(options.output_directory, none) &&
      !std::filesystem::is_directory(options.output_directory, none)) {
    throw UsageError("--output: {} is a file, want a directory", options.output_directory);
  }
  if (options.resume || options.estimate) return;
  const std::vector<std::int64_t> steps = models::checkpoint_steps(options.output_directory);
  if (steps.empty()) return;
  throw UsageError(
      "--output: {} has a run already, of {} steps: --resume goes on with it, a new run wants "
      "another directory",
      options.output_directory, steps.back());
}

}  // namespace

std::chrono::milliseconds timeout_of(const Options& options) {
  return options.train_timeout_ms ? std::chrono::milliseconds(*options.train_timeout_ms)
                                  : models::TrainOptions{}.timeout;
}

TrainSetup train_setup(const Options& options, const World& world) {
  models::Preset base = base_of(options);
  TrainSetup setup;
  setup.tokenizer = tokenizer_of(options);
  // Of a --config the number is what it says, right or wrong.
  if (options.config.empty() && !is_of_init(options) && !setup.tokenizer->is_bytes()) {
    base.model.vocabulary = setup.tokenizer->vocabulary();
  }
  if (setup.tokenizer->is_bytes() && base.model.vocabulary != models::kByteVocabulary) {
    throw UsageError(
        "{}: the model has a vocabulary of {}, but tokens are bytes, {} of them: want --tokenizer "
        "FILE, which switchyard tokenizer makes",
        !options.config.empty() ? "--config " + options.config
        : is_of_init(options)   ? "--init " + options.init
                                : "--preset " + options.preset,
        base.model.vocabulary, models::kByteVocabulary);
  }
  setup.name = base.name;
  setup.config.model = model_of(options, base.model);
  setup.config.seed = static_cast<std::uint64_t>(options.seed);
  setup.config.sequences = options.sequences.value_or(base.sequences);
  setup.config.accumulate = options.accumulate;
  setup.config.schedule = schedule_of(options, base);
  if (!options.compute.empty()) setup.config.compute = enumerator_of<DType>(options.compute);
  for (const std::string& group : options.freeze) {
    setup.config.freeze.push_back(models::parse_group(group));
  }
  setup.config.init = options.init;
  setup.options.communicator = world.launched.get();
  setup.options.ranks =
      world.launched ? world.num_ranks : static_cast<int>(options.ranks.value_or(1));
  setup.options.timeout = timeout_of(options);
  check(setup.config, setup.options.ranks);
  setup.options.backend = choose_backend(options);
  setup.options.directory = options.output_directory;
  setup.options.resume = options.resume;
  setup.options.save_every = options.save_every;
  setup.options.keep = options.keep;
  setup.options.valid_every = options.valid_every;
  setup.options.on_nan = options.on_nan == "skip" ? models::OnNan::kSkip : models::OnNan::kStop;
  setup.options.num_threads = choose_threads(options);
  if (world.launched) setup.options.num_threads = world.num_threads;
  setup.options.recompute = options.recompute == to_string(Recompute::kActivationInput);
  return setup;
}

void check_train_places(const Options& options) {
  if (options.estimate && !options.results.empty()) {
    throw UsageError("--results: given with --estimate, which measures nothing");
  }
  if (options.valid_every > 0 && options.valid.empty()) {
    throw UsageError("--valid-every: {} given without --valid, which it is for",
                     options.valid_every);
  }
  check_held_out(options.texts, options.valid);
  check_run_place(options);
  const NamedFile results{"--results", options.results};
  check_output_place(results, Writing::kAppend);
  std::vector<NamedFile> inputs{{"--config", options.config}, {"--tokenizer", options.tokenizer}};
  for (const std::string& file : options.texts) inputs.push_back({"--text", file});
  for (const std::string& file : options.valid) inputs.push_back({"--valid", file});
  std::vector<NamedFile> outputs{results};
  if (!options.output_directory.empty()) {
    const std::filesystem::path directory = options.output_directory;
    outputs.push_back({"--output", directory / "log.jsonl"});
  }
  check_outputs_apart(outputs, inputs);
}

nlohmann::json train_line(const TrainSetup& setup, const TrainOutcome& outcome,
                          const bench::Machine& machine, const bench::Limits& limits) {
  const models::TrainConfig& config = setup.config;
  const models::ModelConfig& model = config.model;
  const models::TrainResult& result = outcome.result;
  const std::int64_t tokens = config.sequences * model.sequence;
  const double flops = models::count(model).flops_per_token * static_cast<double>(tokens);
  bench::StageFigures stage{.stage = "train_step",
                            .us = bench::statistics(outcome.step_us),
                            .samples = outcome.step_us.size(),
                            .work = {.flops = flops, .flops_executed = flops}};
  stage.limit_us = flops / limits.flops(config.compute) * 1e6;
  stage.limit_by = "compute";
  stage.share = stage.us.median > 0 ? stage.limit_us / stage.us.median : 0;
  bench::CaseResult line;
  line.what = {.name = setup.name,
               .num_experts = model.experts,
               .top_k = model.top_k,
               .hidden = model.hidden,
               .inner = model.inner,
               .num_tokens = tokens,
               .num_ranks = setup.options.ranks,
               .num_threads = setup.options.num_threads,
               .compute = to_string(config.compute),
               .layout = "compact",
               .capacity_factor = model.capacity_factor.value_or(0)};
  line.stages = {stage};
  line.backend = to_string(setup.options.backend);
  line.limits = limits;
  line.seed = static_cast<std::int64_t>(config.seed);
  line.more = {{"suite", "train"},
               {"model", json_of(model)},
               {"steps", result.steps},
               {"first_step", result.first_step},
               {"skipped", result.skipped},
               {"loss", result.last.loss},
               {"valid_loss", result.last.valid_loss ? nlohmann::json(*result.last.valid_loss)
                                                     : nlohmann::json()},
               {"seconds", result.seconds},
               {"estimate",
                {{"seconds", outcome.estimate.seconds},
                 {"bytes", outcome.base_bytes + outcome.estimate.bytes},
                 {"measured_seconds", result.seconds},
                 {"measured_bytes", outcome.peak_bytes}}}};
  for (const models::Group group : config.freeze) line.more["freeze"].push_back(to_string(group));
  if (!config.init.empty()) line.more["init"] = printable(config.init.string());
  return bench::to_lines(line, machine).front();
}

}  // namespace switchyard::tool
