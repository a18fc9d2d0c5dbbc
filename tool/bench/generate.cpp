// `bench --suite generate`: what a prompt costs, and what each token behind it, by batch and
// length.
#include "tool/bench/generate.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <string_view>
#include <vector>

#include "bench/measure/process_memory.hpp"
#include "bench/measure/results.hpp"
#include "bench/measure/stage_memory.hpp"
#include "bench/measure/stage_times.hpp"
#include "core/atomic_file.hpp"
#include "switchyard/device.hpp"
#include "switchyard/models/generate.hpp"
#include "tool/bench/case_table.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/progress.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {
namespace {

using bench::CaseResult;
using models::ModelConfig;

constexpr std::int64_t kNewTokens = 128;
constexpr std::int64_t kPrompts[] = {32, 512};
constexpr std::int64_t kBatches[] = {1, 8, 64};
/// Token steps that are not counted: a cache's first ones make memory, and a GPU's graph.
constexpr std::int64_t kFirstSteps = 3;

/// All options that bench has, but these, are about other suites.
void refuse_others(const Options& options) {
  constexpr std::string_view kTaken[] = {
      "--suite",   "--only",   "--scale",      "--threads", "--isa",     "--backend", "--seed",
      "--compute", "--warmup", "--iterations", "--json",    "--results", "--csv",     "--verbose"};
  const Options none;
  for (const OptionSpec& spec : option_table()) {
    if ((spec.commands & kBench) == 0) continue;
    if (std::ranges::find(kTaken, spec.name) != std::end(kTaken)) continue;
    if (value_text(options, spec) != value_text(none, spec)) {
      throw UsageError("{}: {} given, but the suite generate takes only {}", spec.name,
                       value_text(options, spec), fmt::join(kTaken, ", "));
    }
  }
}

/// The presets of --only, or those that a backend is measured with.
std::vector<const models::Preset*> chosen_presets(const Options& options, Backend backend) {
  std::vector<const models::Preset*> chosen;
  for (const std::string& name : options.only) {
    const auto all = models::presets();
    const auto found = std::ranges::find(all, name, &models::Preset::name);
    if (found == all.end()) {
      std::vector<std::string> names;
      for (const models::Preset& preset : all) names.emplace_back(preset.name);
      throw UsageError("--only: '{}' is no preset of train, want {}", name, fmt::join(names, ", "));
    }
    chosen.push_back(&*found);
  }
  if (!chosen.empty()) return chosen;
  if (backend == Backend::kCuda) return {&models::find_preset("s"), &models::find_preset("m")};
  return {&models::find_preset("smoke"), &models::find_preset("cpu-10min")};
}

struct Point {
  std::int64_t batch, prompt, new_tokens;
};

std::vector<Point> points(double scale) {
  const auto scaled = [&](std::int64_t size) {
    return std::max<std::int64_t>(kFirstSteps + 2, std::llround(static_cast<double>(size) / scale));
  };
  std::vector<Point> all;
  for (const std::int64_t prompt : kPrompts) {
    for (const std::int64_t batch : kBatches) {
      all.push_back({batch, scaled(prompt), scaled(kNewTokens)});
    }
  }
  return all;
}

/// Bytes of a number of the routed experts, and of all else.
struct NumberBytes {
  double experts, others;
};

/// What a call of n new tokens a sequence, behind `before` others, has to move and to multiply.
/// Each number of the model is read once, of the routed experts those of as many as are expected to
/// be hit where each token's are drawn evenly; the cache's are read and written.
StageWork work_of(const ModelConfig& config, std::int64_t batch, std::int64_t before,
                  std::int64_t n, const NumberBytes& bytes) {
  const models::ModelCounts counts = models::count(config);
  const auto rows = static_cast<double>(batch * n);
  const double share = static_cast<double>(config.top_k) / static_cast<double>(config.experts);
  const auto routed = static_cast<double>(counts.routed);
  const auto active = static_cast<double>(counts.active);
  const auto layers = static_cast<double>(config.layers);
  const double cache = layers * static_cast<double>(batch * (before + n)) * 2 *
                       static_cast<double>(config.kv_heads * config.head_dim);
  const double seen = static_cast<double>(before) + static_cast<double>(n + 1) / 2;  // positions
  const auto heads = static_cast<double>(config.heads * config.head_dim);
  return {.bytes = bytes.others * (active - routed * share + cache) +
                   bytes.experts * routed * (1 - std::pow(1 - share, rows)),
          .flops = rows * (2 * active + 4 * layers * seen * heads)};
}

class GenerateSuite {
 public:
  explicit GenerateSuite(const Options& options)
      : options_(options),
        world_(choose_world(options)),
        layer_(layer_options(options)),
        compute_(layer_.compute.value_or(on_gpu() ? DType::kBF16 : DType::kF32)),
        presets_(chosen_presets(options, layer_.backend)),
        machine_(bench::this_machine()),
        limits_(limits_of(world_, layer_.backend)) {}

  int run() {
    BenchReport report(options_, machine_, limits_);
    const std::vector<Point> all = points(options_.scale);
    ProgressBar bar(static_cast<int>(all.size() * presets_.size()));
    int done = 0;
    std::vector<CaseResult> results;
    for (const models::Preset* preset : presets_) {
      for (const Point& point : all) {
        bar.show(done++, fmt::format("{}, {} x ({} + {})", preset->name, point.batch, point.prompt,
                                     point.new_tokens));
        const std::vector<CaseResult> measured = measure(*preset, point);
        bar.clear();
        report.add(measured);
        results.insert(results.end(), measured.begin(), measured.end());
      }
    }
    if (!options_.csv.empty()) write_text(options_.csv, bench::to_csv(results));
    report.finish();
    return kFine;
  }

 private:
  [[nodiscard]] bool on_gpu() const { return layer_.backend == Backend::kCuda; }

  /// A model of its own for each point: what it takes of memory is of the point alone.
  [[nodiscard]] std::vector<CaseResult> measure(const models::Preset& preset, const Point& point) {
    ModelConfig config = preset.model;
    config.sequence = std::max(config.sequence, point.prompt + point.new_tokens);
    bench::return_freed_memory();
    bench::forget_peak();
    const std::int64_t before = on_gpu() ? bench::device_bytes() : bench::resident_bytes();
    models::Model model(config, {.backend = layer_.backend,
                                 .num_threads = world_.num_threads,
                                 .seed = static_cast<std::uint64_t>(options_.seed),
                                 .compute = compute_});
    std::mt19937_64 random(static_cast<std::uint64_t>(options_.seed));
    models::GenerateArgs args{
        .batch = point.batch, .max_new_tokens = point.new_tokens, .sampling = {.temperature = 0}};
    for (std::int64_t i = 0; i < point.prompt; ++i) {
      const auto vocabulary = static_cast<std::uint64_t>(config.vocabulary);
      args.prompt.push_back(static_cast<std::int32_t>(random() % vocabulary));
    }
    std::vector<double> prompt_us;
    std::vector<double> step_us;
    std::int64_t memory = 0;
    const std::int64_t warmup = options_.warmup.value_or(1);
    const std::int64_t runs = warmup + options_.iterations.value_or(3);
    for (std::int64_t run = 0; run < runs; ++run) {
      auto last = std::chrono::steady_clock::now();
      args.on_token = [&](std::int64_t token) {
        const auto now = std::chrono::steady_clock::now();
        const std::chrono::duration<double, std::micro> time = now - last;
        last = now;
        if (run >= warmup && token > kFirstSteps) step_us.push_back(time.count());
        if (on_gpu() && token == point.new_tokens) {
          memory = bench::device_bytes() - before;
        }
        return false;
      };
      const models::Generation made = models::generate(model, args);
      if (run >= warmup) prompt_us.push_back(1e6 * made.prompt_seconds);
    }
    if (!on_gpu()) memory = bench::peak_resident_bytes() - before;
    const auto number = static_cast<double>(size_of(compute_));
    const NumberBytes number_bytes{number, on_gpu() ? number : 4};
    CaseResult prompt = start(preset, config, point, "prompt", point.batch * point.prompt, memory);
    add_stage(prompt, prompt_us, work_of(config, point.batch, 0, point.prompt, number_bytes));
    CaseResult step = start(preset, config, point, "token_step", point.batch, memory);
    add_stage(step, step_us,
              work_of(config, point.batch, point.prompt + point.new_tokens / 2, 1, number_bytes));
    return {std::move(prompt), std::move(step)};
  }

  [[nodiscard]] CaseResult start(const models::Preset& preset, const ModelConfig& config,
                                 const Point& point, const char* stage, std::int64_t tokens,
                                 std::int64_t memory) const {
    CaseResult result;
    result.what = {.name = fmt::format("{} {} x ({} + {})", preset.name, point.batch, point.prompt,
                                       point.new_tokens),
                   .num_experts = static_cast<std::int32_t>(config.experts),
                   .top_k = static_cast<std::int32_t>(config.top_k),
                   .hidden = config.hidden,
                   .inner = config.inner,
                   .num_tokens = tokens,
                   .num_threads = world_.num_threads,
                   .compute = to_string(compute_),
                   .layout = "compact",
                   .skew = "made-up weights",
                   .engine = "threads",
                   .activation = to_string(Activation::kSilu),
                   .cold = false};
    result.limits = limits_;
    result.backend = to_string(layer_.backend);
    result.seed = options_.seed;
    result.whole = stage;
    result.more = {{"preset", preset.name},
                   {"batch", point.batch},
                   {"prompt", point.prompt},
                   {"new_tokens", point.new_tokens},
                   {"memory_bytes", memory}};
    return result;
  }

  /// By the larger of both limits: each number read once a call, products at the peak of their
  /// type.
  void add_stage(CaseResult& result, const std::vector<double>& us, const StageWork& work) const {
    bench::StageFigures figures{
        .stage = result.whole, .us = bench::statistics(us), .samples = us.size(), .work = work};
    const double memory_us = work.bytes / limits_.read_bandwidth * 1e6;
    const double compute_us = work.flops / limits_.flops(on_gpu() ? compute_ : DType::kF32) * 1e6;
    figures.limit_us = std::max(memory_us, compute_us);
    figures.limit_by = memory_us >= compute_us ? "memory" : "compute";
    figures.share = figures.limit_us / figures.us.median;
    result.stages = {std::move(figures)};
  }

  const Options& options_;
  World world_;
  LayerOptions layer_;
  DType compute_;
  std::vector<const models::Preset*> presets_;
  bench::Machine machine_;
  bench::Limits limits_;
};

}  // namespace

int bench_generate(const Options& options) {
  refuse_others(options);
  return GenerateSuite(options).run();
}

}  // namespace switchyard::tool
