// Times steps of training on a GPU by themselves, bf16, on made-up ids: forward, backward and
// optimiser as one graph, from the call to the record of the step on the host.
//
//   model_bench [steps=20] [PRESET|PRESET:E|PRESET:dense ...]
//
// "s:32" has 32 experts; "s:dense" in place of its experts one network of their active width, and
// where it follows its preset the price of routing is the bar M10. Without a preset named it runs
// s, s:dense and s:32. M11 is the time from nothing to the end of the first step of s. Lines that
// begin with '{' are for tools/add_results.py.

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "models/device_model.hpp"
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

/// A line that answers a bar of a preset, which wants at most `target`.
void print_bar(const std::string& bar, const std::string& preset, double value, double target,
               const std::string& more) {
  fmt::print(
      R"({{"stage": "{}", "bar": "{}", "case": {{"name": "{}"}}, "value": {:.4f}, "target": {}, )"
      R"("holds": {}, {}}})"
      "\n",
      bar == "M11" ? "first_step" : "training_step", bar, preset, value, target, value <= target,
      more);
}

/// @return Microseconds of a step.
double run(const std::string& name, std::int64_t steps) {
  const Preset& preset = find_preset(name.substr(0, name.find(':')));
  const ModelConfig config = config_of(name, preset);
  const std::int64_t tokens = preset.sequences * config.sequence;
  SWITCHYARD_CUDA(cudaFree(nullptr));
  const double before = used_bytes();
  const auto begin = std::chrono::steady_clock::now();
  Model model(
      config,
      {.backend = Backend::kCuda, .seed = 1, .max_tokens = tokens, .compute = DType::kBF16});
  AdamW optimizer(model.parameters(), {});
  DeviceModel& device = *model.device();
  device.upload_moments(optimizer);
  Random random(7);
  std::vector<std::int32_t> x(static_cast<std::size_t>(tokens)), y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<std::int32_t>(random.between(0, config.vocabulary - 1));
    y[i] = static_cast<std::int32_t>(random.between(0, config.vocabulary - 1));
  }
  std::vector<double> ms;
  double first_loss = 0, loss = 0;
  for (std::int64_t step = 0; step < steps + 3; ++step) {
    const auto start = std::chrono::steady_clock::now();
    device.start_step({.tokens = {x.data(), {preset.sequences, config.sequence}},
                       .targets = {y.data(), {preset.sequences, config.sequence}},
                       .step = static_cast<std::uint64_t>(step),
                       .learning_rate = 1e-4});
    const DeviceStepResult result = device.finish_step();
    const auto end = std::chrono::steady_clock::now();
    loss = result.stats.nll / static_cast<double>(result.stats.targets);
    if (step == 0) {
      first_loss = loss;
      const double seconds = std::chrono::duration<double>(end - begin).count();
      fmt::print("{}: made and first step in {:.2f} s\n", name, seconds);
      if (name == "s") {
        print_bar("M11", name, seconds, 3, fmt::format(R"("median_us": {:.0f})", 1e6 * seconds));
      }
    }
    // The first is enqueued piece by piece, the second captured.
    if (step >= 3) ms.push_back(1e3 * std::chrono::duration<double>(end - start).count());
  }
  require(!ms.empty(), "{} steps: nothing was timed, want at least 1", steps);
  std::sort(ms.begin(), ms.end());
  const double median = ms[ms.size() / 2];
  fmt::print(
      "{}: step {:.2f} ms (fastest {:.2f}), {:.2f} M tokens/s, {:.1f} TFLOP/s, memory "
      "{:.2f} GiB, loss {:.3f} to {:.3f}\n",
      name, median, ms.front(), static_cast<double>(tokens) / median / 1e3,
      count(config).flops_per_token * static_cast<double>(tokens) / median / 1e9,
      (used_bytes() - before) / double(1 << 30), first_loss, loss);
  fmt::print(
      "{{\"bench\": \"model_bench\", \"model\": \"{}\", \"tokens\": {}, \"step_us\": {:.1f}, "
      "\"fastest_us\": {:.1f}, \"bytes\": {:.0f}}}\n",
      name, tokens, 1e3 * median, 1e3 * ms.front(), used_bytes() - before);
  return 1e3 * median;
}

void run_all(const std::vector<std::string>& names, std::int64_t steps) {
  std::map<std::string, double> step_us;
  for (const std::string& name : names) {
    step_us[name] = run(name, steps);
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
