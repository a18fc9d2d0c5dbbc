#include "models/training/run_state.hpp"

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/file_names.hpp"
#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/json.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "comm/ranks/agreement.hpp"
#include "comm/ranks/together.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "core/splitmix64.hpp"
#include "models/training/tensor_files.hpp"
#include "switchyard/models/files.hpp"

namespace switchyard::models {
namespace {

using nlohmann::json;

constexpr const char* kRunTensor = "run";
// Beside the configuration: steps that were done, and those of them that changed something.
constexpr const char* kStep = "step";
constexpr const char* kUpdates = "updates";

/// What a file says of its run, checked as far as it is read here.
json read_run(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  const StoredTensor* tensor = file.find(kRunTensor);
  require_file(tensor != nullptr && tensor->spec.type == StoredType::kU8, file.name(),
               "has no tensor '{}' of bytes: it is no optimiser's file", kRunTensor);
  json run = parse_json({reinterpret_cast<const char*>(tensor->bytes.data()), tensor->bytes.size()},
                        file.name());
  for (const char* key : {kStep, kUpdates}) {
    require_file(run.is_object() && run.contains(key) && run[key].is_number_unsigned() &&
                     run[key].get<std::uint64_t>() < (std::uint64_t{1} << 53),
                 file.name(), "'{}' has no {}", kRunTensor, key);
  }
  return run;
}

bool has_moments(const std::filesystem::path& file) {
  return SafetensorsFile(file).tensors().size() > 1;
}

std::int64_t step_of(const json& run) { return run[kStep].get<std::int64_t>(); }

/// Steps that a run has when it is at its end.
std::int64_t last_step_of(const json& run, const std::filesystem::path& file) {
  const json::json_pointer steps("/schedule/steps");
  require_file(run.contains(steps) && run[steps].is_number_unsigned(), file.string(),
               "'{}' has no steps of a schedule", kRunTensor);
  return run[steps].get<std::int64_t>();
}

StoredTensor run_tensor(const std::string& words) {
  return {{kRunTensor, StoredType::kU8, {std::ssize(words)}}, std::as_bytes(std::span(words))};
}

void require_same_run(const json& wanted, const json& found, const std::string& file) {
  const json here = wanted.flatten();
  json there = found.flatten();
  for (const char* key : {kStep, kUpdates}) there.erase(fmt::format("/{}", key));
  for (const auto& [key, value] : here.items()) {
    const bool same = there.contains(key) && there[key] == value;
    require(
        same,
        "resuming: {} is {}, but {} is of a run with {}: a run goes on as it began, and another "
        "one begins with its weights (init)",
        key.substr(1), value.dump(), file,
        there.contains(key) ? there[key].dump() : "nothing of that name");
  }
  for (const auto& [key, value] : there.items()) {
    require(here.contains(key), "resuming: {} has {}, {}, which this run has not", file,
            key.substr(1), value.dump());
  }
}

std::uint64_t fingerprint_of(const Tokenizer& tokenizer) {
  return hash_bytes(0, std::as_bytes(std::span(tokenizer.file())));
}

}  // namespace

json run_json(const TrainConfig& config, const Text& text) {
  const Schedule& schedule = config.schedule;
  const AdamWConfig& adamw = config.adamw;
  json run{{"model", json::parse(to_json(config.model))},
           {"seed", config.seed},
           {"sequences", config.sequences},
           {"accumulate", config.accumulate},
           {"compute", to_string(config.compute)},
           {"schedule",
            {{"kind", to_string(schedule.kind)},
             {"peak", schedule.peak},
             {"warmup", schedule.warmup},
             {"steps", schedule.steps},
             {"decay", schedule.decay},
             {"final_share", schedule.final_share}}},
           {"adamw",
            {{"beta1", adamw.beta1},
             {"beta2", adamw.beta2},
             {"epsilon", adamw.epsilon},
             {"weight_decay", adamw.weight_decay},
             {"clip", adamw.clip}}},
           {"text",
            {{"documents", text.documents().size()},
             {"bytes", text.num_bytes()},
             {"fingerprint", text.fingerprint()}}}};
  if (const Tokenizer& tokenizer = text.tokenizer(); !tokenizer.is_bytes()) {
    run["tokenizer"] = {{"vocabulary", tokenizer.vocabulary()},
                        {"fingerprint", fingerprint_of(tokenizer)}};
  }
  for (const Group group : config.freeze) run["freeze"].push_back(to_string(group));
  if (!config.init.empty()) {
    run["init"]["fingerprint"] =
        hash_bytes(0, MappedFile::open(model_directory(config.init) / kSingleFile)->bytes());
  }
  return run;
}

json run_json(const TrainConfig& config, const Text& text, const Text* valid,
              const TrainOptions& options) {
  json run;
  Communicator* const world = world_of(options);
  together(world, [&] {
    run = run_json(config, text);
    if (world == nullptr) return;
    const std::string words = run.dump();
    const auto as_value = [](std::uint64_t hash) { return static_cast<std::int64_t>(hash); };
    std::vector<AgreedValue> values{
        {"bytes of the text", text.num_bytes()},
        {"fingerprint of the text", as_value(text.fingerprint())},
        {"bytes of the held-out text", valid != nullptr ? valid->num_bytes() : 0},
        {"fingerprint of the held-out text", valid != nullptr ? as_value(valid->fingerprint()) : 0},
        {"fingerprint of the tokenizer", as_value(fingerprint_of(text.tokenizer()))},
        {"fingerprint of the configuration",
         as_value(hash_bytes(0, std::as_bytes(std::span(words))))},
        {"save_every", options.save_every},
        {"valid_every", options.valid_every}};
    require_agreement(*world, values);
  });
  return run;
}

std::optional<CheckpointOrigin> read_origin(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kOptimizerFile;
  if (kind_of(file) == FileKind::kNothing) return std::nullopt;
  const json run = read_run(file);
  require_file(run.contains("seed") && run["seed"].is_number_unsigned(), file.string(),
               "'{}' has no seed", kRunTensor);
  return CheckpointOrigin{.step = step_of(run),
                          .seed = run["seed"].get<std::uint64_t>(),
                          .has_init = run.contains("init")};
}

void drop_moments(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kOptimizerFile;
  const json run = read_run(file);
  if (!has_moments(file)) return;
  const std::int64_t last = last_step_of(run, file);
  require(step_of(run) >= last, "{}: moments of step {} are wanted for those up to {}",
          file.string(), step_of(run), last);
  const std::string words = run.dump();
  const StoredTensor alone = run_tensor(words);
  write_safetensors(file, {&alone, 1});
}

void write_checkpoint(Replicas& replicas, const json& run, std::int64_t step,
                      const std::filesystem::path& directory) {
  replicas.write(Replicas::Numbers::kValues, directory / kSingleFile);
  if (replicas.first() == 0) {
    write_text(directory / kConfigFile, to_json(replicas.model().config()));
  }
  json with_step = run;
  with_step[kStep] = step;
  with_step[kUpdates] = replicas.optimizer().steps();
  const std::string words = with_step.dump();
  const StoredTensor with_words = run_tensor(words);
  replicas.write(Replicas::Numbers::kMoments, directory / kOptimizerFile, {&with_words, 1});
}

std::int64_t read_checkpoint(Replicas& replicas, const json& run,
                             const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kOptimizerFile;
  const json found = read_run(file);
  require_same_run(run, found, file.string());
  replicas.load_values(directory);
  if (has_moments(file) || step_of(found) < last_step_of(found, file)) {
    replicas.load(Replicas::Numbers::kMoments, file, {kRunTensor});
  }
  replicas.set_steps(found[kUpdates].get<std::int64_t>());
  return step_of(found);
}

}  // namespace switchyard::models
