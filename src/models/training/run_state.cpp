#include "models/training/run_state.hpp"

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "checkpoint/file_names.hpp"
#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/json.hpp"
#include "checkpoint/files/mapped_file.hpp"
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

void require_same_run(const json& wanted, const json& found, const std::string& file) {
  const json here = wanted.flatten();
  json there = found.flatten();
  for (const char* key : {kStep, kUpdates}) there.erase(fmt::format("/{}", key));
  for (const auto& [key, value] : here.items()) {
    const bool same = there.contains(key) && there[key] == value;
    require(same, "resuming: {} is {}, but {} is of a run with {}", key.substr(1), value.dump(),
            file, there.contains(key) ? there[key].dump() : "nothing of that name");
  }
  for (const auto& [key, value] : there.items()) {
    require(here.contains(key), "resuming: {} has {}, {}, which this run has not", file,
            key.substr(1), value.dump());
  }
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
  for (const Group group : config.freeze) run["freeze"].push_back(to_string(group));
  if (!config.init.empty()) {
    run["init"]["fingerprint"] =
        hash_bytes(0, MappedFile::open(model_directory(config.init) / kSingleFile)->bytes());
  }
  return run;
}

void write_checkpoint(Replicas& replicas, const json& run, std::int64_t step,
                      const std::filesystem::path& directory) {
  write_model(replicas.model().config(), replicas.values(Replicas::Copies::kOne), directory);
  json with_step = run;
  with_step[kStep] = step;
  with_step[kUpdates] = replicas.optimizer().steps();
  const std::string words = with_step.dump();
  std::vector<StoredTensor> tensors = stored_parts(replicas.moments(Replicas::Copies::kOne));
  tensors.push_back(
      {{kRunTensor, StoredType::kU8, {std::ssize(words)}}, std::as_bytes(std::span(words))});
  write_safetensors(directory / kOptimizerFile, tensors);
}

std::int64_t read_checkpoint(Replicas& replicas, const json& run,
                             const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kOptimizerFile;
  const json found = read_run(file);
  require_same_run(run, found, file.string());
  replicas.load_values(directory);
  load_parts(replicas.moments(Replicas::Copies::kAll), file, {kRunTensor});
  for (int rank = 0; rank < replicas.size(); ++rank) {
    replicas.optimizer(rank).set_steps(found[kUpdates].get<std::int64_t>());
  }
  return found[kStep].get<std::int64_t>();
}

}  // namespace switchyard::models
