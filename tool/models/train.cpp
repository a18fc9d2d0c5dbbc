// `switchyard train`: a small language model from text.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "bench/measure/process_memory.hpp"
#include "bench/measure/results.hpp"
#include "bench/measure/stage_memory.hpp"
#include "comm/ranks/gather.hpp"
#include "comm/ranks/launch.hpp"
#include "comm/ranks/together.hpp"
#include "core/human.hpp"
#include "core/printable.hpp"
#include "core/say.hpp"
#include "models/training/run_directory.hpp"
#include "tool/commands.hpp"
#include "tool/interrupt.hpp"
#include "tool/models/common.hpp"
#include "tool/models/train_setup.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/progress.hpp"
#include "tool/report_error.hpp"
#include "tool/setup.hpp"
#include "tool/sweep/duration.hpp"

namespace switchyard::tool {
namespace {

using models::StepRecord;
using models::TrainResult;
using nlohmann::json;

constexpr std::int64_t kRows = 20;  // of the table, about

/// "+7%".
std::string off(double estimate, double measured) {
  return measured > 0 ? fmt::format("{:+.0f}%", 100 * (estimate / measured - 1)) : "-";
}

std::string percent(const std::optional<double>& share) {
  return share ? fmt::format("{:.1f}%", 100 * *share) : "-";
}

models::Text training_text(const Options& options, const TrainSetup& setup) {
  models::Text text = open_text("--text", options.texts, setup.tokenizer);
  models::check(setup.config, text);
  return text;
}

class TrainRun {
 public:
  TrainRun(const Options& options, const World& world)
      : options_(options),
        world_(world),
        setup_(train_setup(options, world)),
        text_(training_text(options, setup_)),
        machine_(bench::this_machine()),
        limits_(world.launched
                    ? limits_of(world, setup_.options.backend)
                    : bench::measure_limits(setup_.options.backend, setup_.options.num_threads)),
        peak_flops_(limits_.flops(setup_.config.compute)),
        expected_flops_(limits_.flops_of_models(setup_.config.compute, setup_.options.backend)) {
    if (!options.valid.empty())
      valid_.emplace(open_text("--valid", options.valid, setup_.tokenizer));
    bench::return_freed_memory();
    bench::forget_peak();
    bench::forget_device_peak();
    if (!on_gpus()) outcome_.base_bytes = of_all(static_cast<double>(bench::resident_bytes()));
    outcome_.estimate = estimate_of(setup_.config.schedule.steps);
  }

  void announce() const {
    const models::TrainConfig& config = setup_.config;
    const models::TrainEstimate& estimate = outcome_.estimate;
    if (!prints()) return;
    const models::TrainOptions& how = setup_.options;
    if (options_.resume && models::checkpoint_steps(options_.output_directory).empty()) {
      fmt::print("{}: nothing to resume, a new run\n", printable(options_.output_directory));
    }
    fmt::print("{}: {}, {}, {}{} thread{}\n", printable(setup_.name), words_of(config.model),
               to_string(config.compute), ranks_words(), how.num_threads,
               how.num_threads == 1 ? "" : "s");
    fmt::print("text: {} document{}, {}", text_.documents().size(),
               text_.documents().size() == 1 ? "" : "s",
               human_count(static_cast<double>(text_.num_bytes()), "B"));
    if (text_.too_short() > 0) {
      fmt::print(" ({} of less than 2 {} left out)", text_.too_short(), text_.unit());
    }
    if (!text_.tokenizer().is_bytes()) {
      const std::int64_t tokens = text_.num_targets() + std::ssize(text_.documents());
      fmt::print(", {} of a vocabulary of {}, {:.2f} bytes each",
                 human_count(static_cast<double>(tokens), "tokens"), text_.tokenizer().vocabulary(),
                 static_cast<double>(text_.num_bytes()) / static_cast<double>(tokens));
    }
    fmt::print("; {} sequences of {} {} a step\n", config.sequences, config.model.sequence,
               text_.unit());
    fmt::print("estimate: {} steps, {}, {}: {}, memory {}, checkpoints of {}\n",
               config.schedule.steps, human_count(static_cast<double>(estimate.tokens), "tokens"),
               human_count(estimate.flops, "FLOP"), human_duration(estimate.seconds),
               human_count(bytes(), "B"), human_count(estimate.checkpoint_bytes, "B"));
    fmt::print("memory{}:", on_gpus() ? how.ranks == 1 ? " of the GPU" : " of the GPUs" : "");
    const char* before = " ";
    for (const auto& [what, size] : purposes()) {
      if (!(size > 0)) continue;
      fmt::print("{}{} {}", before, what, human_count(size, "B"));
      before = ", ";
    }
    fmt::print("\n");
    std::fflush(stdout);
  }

  /// Of a CPU, or of each GPU as if it had nothing else: what is in use there it says itself, as
  /// memory is made before the first step.
  void check_memory() const {
    const auto memory =
        static_cast<double>(on_gpus() ? machine_.gpu_memory_bytes : machine_.memory_bytes);
    const Launch launch = read_launch();
    const double here =
        on_gpus() ? bytes() / setup_.options.ranks : bytes() * launch.local_world / launch.world;
    if (here <= memory) return;
    throw UsageError("{}: about {}{}, more than the {} of {}; see --accumulate and --recompute",
                     setup_.name, human_count(here, "B"), on_gpus() ? " a GPU" : "",
                     human_count(memory, "B"), on_gpus() ? "one" : "this machine");
  }

  int train() {
    const InterruptRequest interrupt;
    ProgressBar bar(world_.is_first() ? static_cast<int>(setup_.config.schedule.steps) : 0);
    setup_.options.peak_flops = peak_flops_;
    setup_.options.on_batch = [&](std::int64_t step, std::int64_t) {
      bar.show(static_cast<int>(step - 1), now());
    };
    setup_.options.on_step = [&](const StepRecord& record) { add(record, bar); };
    setup_.options.stop = [&] { return interrupt.came(); };
    outcome_.result =
        models::train(setup_.config, text_, valid_ ? &*valid_ : nullptr, setup_.options);
    bar.clear();
    together(world_.launched.get(), [&] {
      outcome_.peak_bytes = of_all(static_cast<double>(on_gpus() ? bench::peak_device_bytes()
                                                                 : bench::peak_resident_bytes()));
      scale_estimate();
      if (world_.is_first()) conclude();
    });
    return exit_code();
  }

  /// With --estimate, and of a run that had nothing left to do.
  void print_document() const {
    if (!options_.json || !world_.is_first()) return;
    json document = start_document(options_);
    document["estimate"] = {{"tokens", outcome_.estimate.tokens},
                            {"flops", outcome_.estimate.flops},
                            {"seconds", outcome_.estimate.seconds},
                            {"bytes", bytes()},
                            {"checkpoint_bytes", outcome_.estimate.checkpoint_bytes}};
    for (const auto& [what, size] : purposes()) document["estimate"]["memory"][what] = size;
    document["model"] = json_of(setup_.config.model);
    const models::ModelCounts counts = models::count(setup_.config.model);
    document["parameters"] = counts.parameters;
    document["active"] = counts.active;
    if (counts.adapters > 0) document["adapters"] = counts.adapters;
    if (!outcome_.step_us.empty()) {
      document["run"] = train_line(setup_, outcome_, machine_, limits_);
    }
    if (!outcome_.result.checkpoint.empty()) {
      document["checkpoint"] = printable(outcome_.result.checkpoint.string());
    }
    fmt::print("{}\n", document.dump(2));
  }

 private:
  [[nodiscard]] bool on_gpus() const { return setup_.options.backend == Backend::kCuda; }

  [[nodiscard]] models::TrainEstimate estimate_of(std::int64_t steps) const {
    return models::estimate_training(setup_.config, steps, expected_flops_, limits_.bandwidth,
                                     {.ranks = setup_.options.ranks,
                                      .backend = setup_.options.backend,
                                      .recompute = setup_.options.recompute});
  }

  /// What memory is for, bytes.
  [[nodiscard]] std::vector<std::pair<const char*, double>> purposes() const {
    const models::TrainMemory& memory = outcome_.estimate.memory;
    return {{"weights", memory.weights},   {"gradients", memory.gradients},
            {"moments", memory.moments},   {"activations", memory.activations},
            {"exchange", memory.exchange}, {"process", outcome_.base_bytes}};
  }

  [[nodiscard]] bool prints() const { return world_.is_first() && !options_.json; }

  /// "4 ranks (mpi), each ".
  [[nodiscard]] std::string ranks_words() const {
    if (setup_.options.ranks == 1) return "";
    if (!world_.launched) return fmt::format("{} ranks, ", setup_.options.ranks);
    return fmt::format("{} ranks ({}), each ", setup_.options.ranks, world_.engine());
  }

  /// A number of this process, added over all. Collective.
  [[nodiscard]] double of_all(double number) const {
    if (!world_.launched) return number;
    return sum_over_ranks(*world_.launched, std::vector<double>{number}).front();
  }

  [[nodiscard]] double bytes() const { return outcome_.base_bytes + outcome_.estimate.bytes; }

  /// What the bar says beside the count.
  [[nodiscard]] std::string now() const {
    if (outcome_.step_us.empty()) return "";
    const auto done = static_cast<double>(outcome_.step_us.size());
    const auto to_come = static_cast<double>(setup_.config.schedule.steps - last_.step);
    std::string words =
        fmt::format("loss {:.3f}, {} tokens/s", last_.loss, human_count(last_.tokens_per_s, ""));
    if (last_.share) words += fmt::format(" ({} of the peak)", percent(last_.share));
    if (last_.load_cv) words += fmt::format(", load CV {:.2f}", *last_.load_cv);
    if (last_.dropped) words += fmt::format(", {} dropped", percent(last_.dropped));
    return words + fmt::format(", {} to come", human_duration(seconds_ / done * to_come));
  }

  void add(const StepRecord& record, ProgressBar& bar) {
    outcome_.step_us.push_back(record.seconds * 1e6);
    seconds_ += record.seconds;
    last_ = record;
    const std::int64_t steps = setup_.config.schedule.steps;
    const std::int64_t every = std::max<std::int64_t>(1, steps / kRows);
    const bool is_row = record.step % every == 0 || outcome_.step_us.size() == 1 ||
                        record.step == steps || record.valid_loss || record.skipped;
    if (!prints() || !is_row) return;
    bar.clear();
    if (outcome_.step_us.size() == 1) {
      fmt::print("\n{:>8} {:>8} {:>9} {:>9} {:>10} {:>7} {:>8} {:>8} {:>9}\n", "step", "loss",
                 "norm", "lr", "tokens/s", "share", "load CV", "dropped", "held out");
    }
    fmt::print("{:>8} {:>8.4f} {:>9.3g} {:>9.2e} {:>10} {:>7} {:>8} {:>8}{}{}\n", record.step,
               record.loss, record.norm, record.learning_rate, human_count(record.tokens_per_s, ""),
               percent(record.share), record.load_cv ? fmt::format("{:.3f}", *record.load_cv) : "-",
               percent(record.dropped),
               record.valid_loss ? fmt::format(" {:>9.4f}", *record.valid_loss) : "",
               record.skipped ? " skipped" : "");
    std::fflush(stdout);
  }

  /// The estimate of the steps that were done, which a resumed or ended run has fewer of.
  void scale_estimate() {
    const std::int64_t done = outcome_.result.steps - outcome_.result.first_step;
    outcome_.estimate = estimate_of(done);
  }

  void conclude() const {
    const TrainResult& result = outcome_.result;
    if (!options_.results.empty() && !outcome_.step_us.empty()) {
      bench::append_lines(options_.results, {train_line(setup_, outcome_, machine_, limits_)});
    }
    print_document();
    if (options_.json) return;
    const std::int64_t done = result.steps - result.first_step;
    if (done == 0 && result.end == TrainResult::End::kFinished) {
      fmt::print("all of its {} steps were done before\n", result.steps);
    } else {
      fmt::print("\n{} step{} in {}, estimate {}; memory {}, estimate {}", done,
                 done == 1 ? "" : "s", human_duration(result.seconds),
                 off(outcome_.estimate.seconds, result.seconds),
                 human_count(outcome_.peak_bytes, "B"), off(bytes(), outcome_.peak_bytes));
      if (result.first_step > 0) fmt::print("; resumed behind step {}", result.first_step);
      if (result.skipped > 0) fmt::print("; {} skipped", result.skipped);
      fmt::print("\n");
    }
    if (!result.checkpoint.empty()) fmt::print("{}\n", printable(result.checkpoint.string()));
  }

  [[nodiscard]] int exit_code() const {
    switch (outcome_.result.end) {
      case TrainResult::End::kFinished: return kFine;
      case TrainResult::End::kInterrupted: return kInterrupted;
      case TrainResult::End::kNotFinite:
        if (!world_.is_first()) return kFailure;
        std::fflush(stdout);
        say(fmt::format("switchyard: {}; nothing was changed by this step, see --on-nan\n",
                        printable(outcome_.result.not_finite->text(), kPrintableLine)));
        return kFailure;
    }
    return kFailure;
  }

  const Options& options_;
  const World& world_;
  TrainSetup setup_;
  models::Text text_;
  std::optional<models::Text> valid_;
  bench::Machine machine_;
  bench::Limits limits_;
  double peak_flops_;
  double expected_flops_;
  TrainOutcome outcome_;
  StepRecord last_;
  double seconds_ = 0;
};

/// Up to the first step.
void begin(const Options& options, const World& world, std::optional<TrainRun>& run) {
  try {
    if (world.launched) world.launched->set_timeout(timeout_of(options));
    if (world.is_first()) check_train_places(options);
    run.emplace(options, world);
    run->announce();
    if (options.estimate) return run->print_document();
    run->check_memory();
  } catch (const UsageError& error) {
    if (!world.launched) throw;
    throw CommonError(ErrorCode::kInvalidArgument, error.what());
  }
}

}  // namespace

int train_command(const Options& options) {
  check_place(options);
  World world;
  if (read_launch().world > 1) world = choose_world(options);
  Communicator* const ranks = world.launched.get();
  try {
    std::optional<TrainRun> run;
    together(ranks, [&] { begin(options, world, run); });
    if (options.estimate) return kFine;
    return run->train();
  } catch (const CommonError& error) {
    // One says it; a launcher that sees another end may kill the one.
    if (world.is_first()) report_error(error.what(), kFailure);
    try {
      ranks->barrier("end");
    } catch (const Error&) {
      // Then each ends by itself.
    }
    return exit_code_of(error.code());
  }
}

}  // namespace switchyard::tool
