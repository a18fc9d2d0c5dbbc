// Times generation on a GPU, bf16, greedy, behind a prompt of 512 made-up ids: the prompt of all
// sequences, then steps of one token each, from one step's tokens on the host to the next one's,
// as generate() takes them. Lines that begin with '{' are for tools/add_results.py.
//
//   generate_bench [PRESET ...]     (without one: s and m)

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "models/device_model.hpp"
#include "switchyard/models/config.hpp"
#include "testkit/random.hpp"

namespace switchyard::models {
namespace {

constexpr std::int64_t kPrompt = 512, kTokens = 128;
constexpr int kPrompts = 7;

/// What is asked: a step's ms by batch, the prompts' tokens a second at a batch of 8.
struct Bars {
  const char* preset;
  const char* step;
  std::array<double, 3> step_ms;
  double prompt_tokens_per_s;
};
constexpr std::array<std::int64_t, 3> kBatches = {1, 8, 64};
constexpr std::array<Bars, 2> kBars = {{{"s", "M4", {0.12, 0.17, 0.30}, 2 * 477'938.0},
                                        {"m", "M5", {0.30, 0.55, 1.1}, 2 * 226'857.0}}};

const Bars* bars_of(const std::string& preset) {
  for (const Bars& bars : kBars) {
    if (preset == bars.preset) return &bars;
  }
  return nullptr;
}

double at_share(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size()))];
}

double us_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return 1e6 * std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void print(const std::string& stage, const std::string& name, const std::vector<double>& us,
           const std::string& more, const char* bar, double value, double target, bool holds) {
  std::string line =
      fmt::format(R"({{"stage": "{}", "case": {{"name": "{}"}}, "backend": "cuda", "samples": {}, )"
                  R"("median_us": {:.2f}, "p95_us": {:.2f}, {})",
                  stage, name, us.size(), at_share(us, 0.5), at_share(us, 0.95), more);
  if (bar != nullptr) {
    line += fmt::format(R"(, "bar": "{}", "value": {:.6g}, "target": {:.6g}, "holds": {})", bar,
                        value, target, holds);
  }
  fmt::print("{}}}\n", line);
}

class GenerateBench {
 public:
  explicit GenerateBench(const std::string& preset)
      : preset_(preset),
        bars_(bars_of(preset)),
        config_(with_room(find_preset(preset).model)),
        model_(config_,
               {.backend = Backend::kCuda, .num_threads = 8, .seed = 1, .compute = DType::kBF16}) {}

  void run() {
    for (std::size_t i = 0; i < kBatches.size(); ++i) run_batch(i);
  }

 private:
  static ModelConfig with_room(ModelConfig config) {
    config.sequence = std::max(config.sequence, kPrompt + kTokens);
    return config;
  }

  void run_batch(std::size_t of) {
    const std::int64_t batch = kBatches[of];
    Random random(7);
    std::vector<std::int32_t> prompt(static_cast<std::size_t>(batch * kPrompt));
    for (std::int32_t& id : prompt) {
      id = static_cast<std::int32_t>(random.between(0, config_.vocabulary - 1));
    }
    std::vector<float> logits(static_cast<std::size_t>(batch * config_.vocabulary));
    Cache cache = model_.make_cache(batch, kPrompt + kTokens);
    const auto read = [&] {
      cache.truncate(0);
      model_.decode({prompt.data(), {batch, kPrompt}}, cache,
                    {logits.data(), {batch, config_.vocabulary}});
    };
    for (int i = 0; i < 2; ++i) read();
    std::vector<double> prompts;
    for (int i = 0; i < kPrompts; ++i) prompts.push_back(us_of(read));
    const double per_s = 1e6 * static_cast<double>(batch * kPrompt) / at_share(prompts, 0.5);
    const bool asked = bars_ != nullptr && batch == 8;
    const double target = asked ? bars_->prompt_tokens_per_s : 0;
    print("prompt", fmt::format("{} prompt of {} batch {}", preset_, kPrompt, batch), prompts,
          fmt::format(R"("tokens_per_s": {:.0f})", per_s), asked ? "M6" : nullptr, per_s, target,
          per_s >= target);

    // Twice: the first time steps are enqueued one by one, and captured.
    std::vector<double> steps, alone;
    for (int i = 0; i < 2; ++i) steps = times_of_steps(cache, logits);
    DeviceModel& device = *model_.device();
    std::vector<std::int32_t> first(static_cast<std::size_t>(batch));
    for (std::int64_t i = 0; i + 1 < kTokens; ++i) {
      alone.push_back(us_of([&] {
        device.start_token(i == 0 ? first.data() : nullptr, *cache.state().device, kPrompt + i);
        (void)device.finish_token(*cache.state().device);
      }));
    }
    const double ms = at_share(steps, 0.5) / 1e3;
    const double most = bars_ == nullptr ? 0 : bars_->step_ms[of];
    print("token_step", fmt::format("{} batch {}", preset_, batch), steps,
          fmt::format(R"("tokens_per_s": {:.0f}, "alone_us": {:.2f})",
                      1e3 * static_cast<double>(batch) / ms, at_share(alone, 0.5)),
          bars_ == nullptr ? nullptr : bars_->step, ms, most, ms <= most);
  }

  /// From the tokens of one step to those of the next, which is under way meanwhile.
  std::vector<double> times_of_steps(Cache& cache, const std::vector<float>& logits) {
    DeviceModel& device = *model_.device();
    DeviceCache& on_device = *cache.state().device;
    std::vector<std::int32_t> ids;
    for (std::int64_t b = 0; b < cache.batch(); ++b) {
      const auto row = logits.begin() + b * config_.vocabulary;
      ids.push_back(
          static_cast<std::int32_t>(std::max_element(row, row + config_.vocabulary) - row));
    }
    std::vector<double> us;
    device.start_token(ids.data(), on_device, kPrompt);
    for (std::int64_t i = 1; i < kTokens; ++i) {
      const double step = us_of([&] {
        device.start_token(nullptr, on_device, kPrompt + i);
        (void)device.finish_token(on_device);
      });
      if (i > 2) us.push_back(step);
    }
    (void)device.finish_token(on_device);
    return us;
  }

  std::string preset_;
  const Bars* bars_;
  ModelConfig config_;
  Model model_;
};

}  // namespace
}  // namespace switchyard::models

int main(int argc, char** argv) {
  std::vector<std::string> presets(argv + 1, argv + argc);
  if (presets.empty()) presets = {"s", "m"};
  try {
    for (const std::string& preset : presets) switchyard::models::GenerateBench(preset).run();
  } catch (const std::exception& error) {
    fmt::print(stderr, "generate_bench: {}\n", error.what());
    return EXIT_FAILURE;
  }
}
