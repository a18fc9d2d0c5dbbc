// Times steps of training on a GPU by themselves, bf16, on made-up ids: forward, backward and
// optimiser as one graph, from the call to the record of the step on the host.
//
//   model_bench [steps=20] [PRESET|PRESET:E|PRESET:dense|PRESET@R ...]
//
// "s:32" has 32 experts; "s:dense" in place of its experts one network of their active width, and
// where it follows its preset the price of routing is the bar M10. "m@2" is trained by two ranks,
// threads with a GPU each and as many tokens each as one alone; where it follows its preset what is
// left of a rank's speed is the bar M9. Without a preset named it runs s, s:dense and s:32. M8 is
// the memory of s or m over 16 bytes a parameter and what the way back is saved, M11 the time from
// nothing to the end of the first step of s. Lines that begin with '{' are for
// tools/add_results.py.

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/ranks/run_ranks.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "models/device_model.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/device.hpp"
#include "switchyard/models/config.hpp"
#include "testkit/random.hpp"

namespace switchyard::models {
namespace {

double used_bytes() {
  std::size_t free = 0, all = 0;
  SWITCHYARD_CUDA(cudaMemGetInfo(&free, &all));
  return static_cast<double>(all - free);
}

/// "s", "s:32" or "s:dense".
ModelConfig config_of(const std::string& name, const Preset& preset) {
  ModelConfig config = preset.model;
  const std::size_t colon = name.find(':');
  if (colon == std::string::npos) return config;
  const std::string what = name.substr(colon + 1);
  if (what == "dense") {
    config.first_dense = config.layers;
    config.dense_inner = config.top_k * config.inner;
    config.experts = 0;
    config.losses = {};
    return config;
  }
  const auto read = std::from_chars(what.data(), what.data() + what.size(), config.experts);
  require(read.ec == std::errc() && read.ptr == what.data() + what.size(),
          "'{}': want a preset, alone or with ':' and a number of experts or 'dense'", name);
  return config;
}

/// A line that answers a bar of a preset, which wants at most `target`, or (M9) at least.
void print_bar(const std::string& bar, const std::string& preset, double value, double target,
               const std::string& more, int num_ranks = 1) {
  const bool holds = bar == "M9" ? value >= target : value <= target;
  const char* const stage = bar == "M11"  ? "first_step"
                            : bar == "M8" ? "training_memory"
                                          : "training_step";
  fmt::print(R"({{"stage": "{}", "bar": "{}", "case": {{"name": "{}", "R": {}}}, "value": {:.4f}, )"
             R"("target": {}, "holds": {}, {}}})"
             "\n",
             stage, bar, preset, num_ranks, value, target, holds, more);
}

/// Bytes that a step in bf16 keeps for its way back: models/gpu/model.hpp (LayerRooms) and
/// SavedForward have what, of a model of MoE layers.
double kept_bytes(const ModelConfig& config, std::int64_t tokens) {
  const std::int64_t hidden = config.hidden, dim = config.head_dim;
  const std::int64_t heads = config.heads, kv_heads = config.kv_heads;
  const std::int64_t streams = 2 * 4 * hidden;
  const std::int64_t rows = 2 * (2 * hidden + (3 * heads + 3 * kv_heads) * dim);
  const std::int64_t scales = 4 * (2 + (heads + kv_heads) + heads);
  const std::int64_t experts = 2 * config.top_k * 2 * config.inner;
  const std::int64_t routing = 4 * config.experts + 8 * config.top_k;
  return static_cast<double>(tokens * config.layers *
                             (streams + rows + scales + experts + routing));
}

struct Ids {
  std::vector<std::int32_t> tokens, targets;
};

Ids made_up_ids(std::int64_t count, const ModelConfig& config) {
  Random random(7);
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) {
    ids.tokens.push_back(static_cast<std::int32_t>(random.between(0, config.vocabulary - 1)));
    ids.targets.push_back(static_cast<std::int32_t>(random.between(0, config.vocabulary - 1)));
  }
  return ids;
}

/// What a rank's steps came to.
struct Steps {
  double seconds_to_first = 0;
  double first_loss = 0, last_loss = 0;
  double bytes = 0;          ///< That the model took on the rank's GPU.
  std::vector<double> ms{};  ///< The fastest first.
};

/// Makes a model, and goes `steps` and three steps with it. @param ranks  Null: one.
Steps train(const ModelConfig& config, std::int64_t sequences, std::int64_t steps,
            Communicator* ranks) {
  const int num_ranks = ranks == nullptr ? 1 : ranks->size();
  const std::int64_t tokens = sequences * config.sequence;
  SWITCHYARD_CUDA(cudaFree(nullptr));
  const double before = used_bytes();
  const auto begin = std::chrono::steady_clock::now();
  const int threads = static_cast<int>(std::thread::hardware_concurrency()) / num_ranks;
  Model model(config, {.backend = Backend::kCuda,
                       .num_threads = std::max(1, threads),
                       .seed = 1,
                       .max_tokens = tokens,
                       .compute = DType::kBF16,
                       .communicator = ranks});
  AdamW optimizer(model.parameters(), {});
  DeviceModel& device = *model.device();
  device.upload_moments(optimizer);
  const Ids ids = made_up_ids(num_ranks * tokens, config);
  const std::array<std::int64_t, 2> shape = {num_ranks * sequences, config.sequence};
  Steps said;
  for (std::int64_t step = 0; step < steps + 3; ++step) {
    const auto start = std::chrono::steady_clock::now();
    device.start_step({.tokens = {ids.tokens.data(), shape},
                       .targets = {ids.targets.data(), shape},
                       .step = static_cast<std::uint64_t>(step),
                       .learning_rate = 1e-4});
    const DeviceStepResult result = device.finish_step();
    const auto end = std::chrono::steady_clock::now();
    said.last_loss = result.stats.nll / static_cast<double>(result.stats.targets);
    if (step == 0) {
      said.first_loss = said.last_loss;
      said.seconds_to_first = std::chrono::duration<double>(end - begin).count();
    }
    // The first is enqueued piece by piece, the second captured.
    if (step >= 3) said.ms.push_back(1e3 * std::chrono::duration<double>(end - start).count());
  }
  require(!said.ms.empty(), "{} steps: nothing was timed, want at least 1", steps);
  said.bytes = used_bytes() - before;
  std::sort(said.ms.begin(), said.ms.end());
  return said;
}

/// Ranks that are threads, a GPU each. @returns What the first has seen.
Steps train_on(int num_ranks, const ModelConfig& config, std::int64_t sequences,
               std::int64_t steps) {
  if (num_ranks == 1) return train(config, sequences, steps, nullptr);
  const std::int64_t gpus = std::ssize(find_gpus().list);
  require(num_ranks <= gpus, "{} ranks want a GPU each, there are {}", num_ranks, gpus);
  Steps first;
  run_ranks(
      num_ranks,
      [&](Communicator& rank) {
        use_gpu_of_rank(rank.rank());
        Steps said = train(config, sequences, steps, &rank);
        if (rank.rank() == 0) first = std::move(said);
      },
      std::chrono::minutes(1));
  return first;
}

/// The number behind "@", or 1.
int ranks_of(const std::string& name) {
  const std::size_t at = name.find('@');
  if (at == std::string::npos) return 1;
  int number = 0;
  const auto read = std::from_chars(name.data() + at + 1, name.data() + name.size(), number);
  require(read.ec == std::errc() && read.ptr == name.data() + name.size() && number >= 1,
          "'{}': want a number of ranks behind '@'", name);
  return number;
}

/// @return Microseconds of a step.
double run(const std::string& name, std::int64_t steps) {
  const std::string what = name.substr(0, name.find('@'));
  const int num_ranks = ranks_of(name);
  const Preset& preset = find_preset(what.substr(0, what.find(':')));
  const ModelConfig config = config_of(what, preset);
  const std::int64_t tokens = num_ranks * preset.sequences * config.sequence;
  const Steps said = train_on(num_ranks, config, preset.sequences, steps);
  fmt::print("{}: made and first step in {:.2f} s\n", name, said.seconds_to_first);
  if (name == preset.name) {
    const double kept = kept_bytes(config, tokens);
    const double least = 16 * static_cast<double>(count(config).parameters) + kept;
    print_bar("M8", name, said.bytes / least, 1.1,
              fmt::format(R"("bytes": {:.0f}, "saved_bytes": {:.0f})", said.bytes, kept));
  }
  if (name == "s") {
    print_bar("M11", name, said.seconds_to_first, 3,
              fmt::format(R"("median_us": {:.0f})", 1e6 * said.seconds_to_first));
  }
  const double median = said.ms[said.ms.size() / 2];
  fmt::print(
      "{}: step {:.2f} ms (fastest {:.2f}), {:.2f} M tokens/s, {:.1f} TFLOP/s, memory "
      "{:.2f} GiB, loss {:.3f} to {:.3f}\n",
      name, median, said.ms.front(), static_cast<double>(tokens) / median / 1e3,
      count(config).flops_per_token * static_cast<double>(tokens) / median / 1e9,
      said.bytes / double(1 << 30), said.first_loss, said.last_loss);
  fmt::print(
      "{{\"bench\": \"model_bench\", \"model\": \"{}\", \"tokens\": {}, \"step_us\": {:.1f}, "
      "\"fastest_us\": {:.1f}, \"bytes\": {:.0f}}}\n",
      name, tokens, 1e3 * median, 1e3 * said.ms.front(), said.bytes);
  return 1e3 * median;
}

void run_all(const std::vector<std::string>& names, std::int64_t steps) {
  std::map<std::string, double> step_us;
  for (const std::string& name : names) {
    step_us[name] = run(name, steps);
    const std::size_t at = name.find('@');
    if (at != std::string::npos && step_us.contains(name.substr(0, at))) {
      const double alone = step_us[name.substr(0, at)];
      print_bar("M9", name, alone / step_us[name], 0.9,
                fmt::format(R"("median_us": {:.1f}, "alone_us": {:.1f})", step_us[name], alone),
                ranks_of(name));
    }
    const std::string preset = name.substr(0, name.find(':'));
    if (name == preset || name != preset + ":dense" || !step_us.contains(preset)) continue;
    const double dense = step_us[name];
    print_bar("M10", preset, step_us[preset] / dense, preset == "m" ? 1.25 : 1.20,
              fmt::format(R"("median_us": {:.1f}, "dense_us": {:.1f})", step_us[preset], dense));
  }
}

}  // namespace
}  // namespace switchyard::models

int main(int argc, char** argv) {
  std::int64_t steps = 20;
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    std::int64_t number = 0;
    const auto read = std::from_chars(word.data(), word.data() + word.size(), number);
    if (read.ptr == word.data() + word.size()) {
      steps = number;
    } else {
      names.push_back(word);
    }
  }
  if (names.empty()) names = {"s", "s:dense", "s:32"};
  try {
    switchyard::models::run_all(names, steps);
  } catch (const std::exception& error) {
    fmt::print(stderr, "model_bench: {}\n", error.what());
    return EXIT_FAILURE;
  }
}
