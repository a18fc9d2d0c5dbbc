#include "tool/models/common.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "bench/measure/machine.hpp"
#include "comm/ranks/launch.hpp"
#include "core/check.hpp"
#include "core/human.hpp"
#include "core/printable.hpp"
#include "switchyard/error.hpp"
#include "switchyard/models/files.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/progress.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {
namespace {

DType compute_of(const Options& options) {
  return options.compute.empty() ? DType::kF32 : enumerator_of<DType>(options.compute);
}

}  // namespace

void check_place(const Options& options) {
  const Launch launch = read_launch();
  const bool trains = options.command == Command::kTrain;
  if (launch.world > 1 && !trains) {
    throw UsageError("--ranks: {} runs on one rank so far, not as {} processes of {}",
                     to_string(options.command), launch.world, launch.launcher);
  }
  const std::int64_t ranks = options.ranks.value_or(launch.world);
  if (ranks > 1 && !trains) {
    throw UsageError("--ranks: {} runs on one rank so far, not on {}", to_string(options.command),
                     ranks);
  }
}

int choose_threads(const Options& options) {
  choose_isa(options);
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return static_cast<int>(options.threads.value_or(cores));
}

models::Text open_text(const char* option, const std::vector<std::string>& files,
                       std::shared_ptr<const models::Tokenizer> tokenizer) {
  try {
    return models::Text({files.begin(), files.end()}, std::move(tokenizer));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kIo) throw;
    throw UsageError("{}: {}", option, message_of(error));
  }
}

std::string common_file(const std::vector<std::string>& files,
                        const std::vector<std::string>& others) {
  for (const std::string& file : files) {
    for (const std::string& other : others) {
      std::error_code none;
      if (file == other || std::filesystem::equivalent(file, other, none)) return file;
    }
  }
  return {};
}

void check_held_out(const std::vector<std::string>& texts, const std::vector<std::string>& valid) {
  const std::string both = common_file(valid, texts);
  if (both.empty()) return;
  throw UsageError("--valid: {} is trained on, want a text that is held out", both);
}

models::Model open_model(const Options& options, const std::filesystem::path& directory) {
  if (weights_of(options.weights) != WeightFormat::kExact) {
    throw UsageError("--weights: models that train has written are computed in exact ones, not {}",
                     options.weights);
  }
  return models::load_model(directory, {.backend = choose_backend(options),
                                        .num_threads = choose_threads(options),
                                        .compute = compute_of(options)});
}

models::ReleasedModel open_released(const Options& options,
                                    const std::filesystem::path& directory) {
  if (options.backend == "cuda") {
    throw UsageError("--backend: released models run on a CPU so far, want cpu, not cuda");
  }
  LoadBar bar("percent of the layers");
  models::ReleasedModel model(directory, {.num_threads = choose_threads(options),
                                          .compute = compute_of(options),
                                          .weights = weights_of(options.weights),
                                          .progress = [&](double share) { bar.show(share); }});
  bar.clear();
  return model;
}

std::string words_of(const models::ModelConfig& config) {
  const models::ModelCounts counts = models::count(config);
  std::string words = fmt::format("L{} H{} heads {}/{} S{}", config.layers, config.hidden,
                                  config.heads, config.kv_heads, config.sequence);
  if (config.experts > 0) {
    const std::string chosen =
        models::soft_moe_config(config) ? "" : fmt::format(" K{}", config.top_k);
    words += fmt::format(" E{}{} I{} {}", config.experts, chosen, config.inner, config.router);
  }
  if (config.first_dense > 0) words += fmt::format(", {} dense", config.first_dense);
  if (config.capacity_factor) words += fmt::format(", capacity {:g}", *config.capacity_factor);
  if (const auto& adapters = config.adapters) {
    words += fmt::format(", {} adapters", to_string(adapters->kind));
    if (adapters->kind == PerftKind::kRouted) words += fmt::format(" {} of", adapters->top_k);
    words += fmt::format(" {}, rank {}, {} numbers that learn", adapters->num_adapters,
                         adapters->rank, counts.adapters);
  }
  return words + fmt::format(", {} parameters ({} active)",
                             human_count(static_cast<double>(counts.parameters), ""),
                             human_count(static_cast<double>(counts.active), ""));
}

nlohmann::json json_of(const models::ModelConfig& config) {
  return nlohmann::json::parse(models::to_json(config));
}

nlohmann::json start_document(const Options& options) {
  const bench::Machine machine = bench::this_machine();
  return {{"schema", 1},
          {"options", echo(options)},
          {"commit", bench::build_commit()},
          {"versions", bench::versions()},
          {"machine", {{"cpu", machine.cpu}, {"isa", machine.isa}, {"cores", machine.cores}}}};
}

std::string shown(std::string_view bytes) {
  std::string text;
  std::string line;
  const auto end_line = [&] { text += printable(std::exchange(line, {}), SIZE_MAX); };
  for (const char c : bytes) {
    if (c == '\n' || c == '\t') {
      end_line();
      text += c;
    } else {
      line += c;
    }
  }
  end_line();
  return text;
}

}  // namespace switchyard::tool
