// A run: batch, gradients, optimiser, log, checkpoint, step after step.
#include "switchyard/models/trainer.hpp"

#include <fmt/core.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>

#include "comm/ranks/gather.hpp"
#include "comm/ranks/together.hpp"
#include "core/check.hpp"
#include "models/device_model.hpp"
#include "models/training/log_file.hpp"
#include "models/training/replicas.hpp"
#include "models/training/run_directory.hpp"
#include "models/training/run_state.hpp"
#include "switchyard/models/evaluate.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/routing/metrics.hpp"

namespace switchyard::models {
namespace {

using Clock = std::chrono::steady_clock;

/// The layer in "model.layers.3.mlp.gate.weight"; -1 where there is none.
std::int32_t layer_of(std::string_view tensor) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!tensor.starts_with(kLayers)) return -1;
  std::int32_t layer = 0;
  for (const char c : tensor.substr(kLayers.size())) {
    if (c < '0' || c > '9') break;
    layer = 10 * layer + (c - '0');
  }
  return layer;
}

/// What a step's loads say, means over the MoE layers.
void rate_loads(const StepStats& stats, std::int64_t tokens, StepRecord& record) {
  if (stats.layers.empty()) return;
  double cv = 0;
  double most = 0;
  double picks = 0;
  for (const RoutingStats& layer : stats.layers) {
    const metrics::Load load = metrics::load({layer.counts.data(), {std::ssize(layer.counts)}});
    std::int64_t kept = 0;
    for (const std::int64_t n : layer.counts_kept) kept += n;
    cv += load.cv;
    most += load.max_over_mean - 1;
    picks += static_cast<double>(kept) / static_cast<double>(tokens);
  }
  const auto layers = static_cast<double>(stats.layers.size());
  record.load_cv = cv / layers;
  record.max_vio = most / layers;
  record.picks = picks / layers;
}

class Run {
 public:
  Run(const TrainConfig& config, const Text& text, const Text* valid, const TrainOptions& options)
      : config_(config),
        text_(text),
        valid_(valid),
        options_(options),
        world_(world_of(options)),
        run_(run_json(config, text, valid, options)),
        directory_(made_directory()),
        replicas_(config, options),
        flops_per_step_(count(config.model).flops_per_token *
                        static_cast<double>(config.sequences * config.model.sequence)) {
    together(world_, [&] { begin(); });
    on_first(world_, [&] { log_.emplace(directory_->path() / "log.jsonl", result_.steps); });
    if (device_of() != nullptr) {
      replicas_.on_each([&](int rank) {
        replicas_.model(rank).device()->upload_moments(replicas_.optimizer(rank));
      });
    }
  }

  TrainResult train() {
    const std::int64_t steps = config_.schedule.steps;
    while (result_.steps < steps) {
      if (options_.on_batch) options_.on_batch(result_.steps + 1, steps);
      StepRecord record = step(result_.steps);
      if (result_.not_finite && !record.skipped) {
        result_.end = TrainResult::End::kNotFinite;
        return result_;
      }
      result_.skipped += record.skipped ? 1 : 0;
      ++result_.steps;
      if (is_due(options_.valid_every) && valid_ != nullptr) {
        record.valid_loss = held_out_loss();
        if (options_.measure) record.measured = options_.measure(replicas_.model());
      }
      result_.last = record;
      const bool stop = log_and_ask(record) && result_.steps < steps;
      if (stop || is_due(options_.save_every)) save();
      if (stop) {
        result_.end = TrainResult::End::kInterrupted;
        break;
      }
    }
    on_first(world_, [&] { log_->sync(); });
    return result_;
  }

 private:
  /// Of the first rank, which alone writes.
  std::unique_ptr<RunDirectory> made_directory() {
    std::unique_ptr<RunDirectory> directory;
    on_first(world_, [&] { directory = std::make_unique<RunDirectory>(options_.directory); });
    return directory;
  }

  /// What is there of the run: the steps that the newest checkpoint has, as the first rank sees it.
  void begin() {
    double newest = -1;
    if (directory_) {
      const std::vector<std::int64_t> steps = checkpoint_steps(options_.directory);
      require(steps.empty() || options_.resume,
              "{} has a run already, of {} steps: resume it, or take another directory",
              options_.directory.string(), steps.empty() ? 0 : steps.back());
      if (!steps.empty()) newest = static_cast<double>(steps.back());
    }
    if (world_ != nullptr) newest = from_first(*world_, newest);
    if (newest < 0) {
      if (!config_.init.empty()) replicas_.load_base(model_directory(config_.init));
      return;
    }
    const auto step = static_cast<std::int64_t>(newest);
    result_.checkpoint = options_.directory / checkpoint_name(step);
    result_.steps = read_checkpoint(replicas_, run_, result_.checkpoint);
    require(result_.steps == step, "{} is of step {}", result_.checkpoint.string(), result_.steps);
    result_.first_step = result_.steps;
  }

  /// Writes the step's line. @returns whether any process is asked to end here.
  bool log_and_ask(const StepRecord& record) {
    bool stop = false;
    together(world_, [&] {
      if (log_) log_->append(record);
      if (options_.on_step) options_.on_step(record);
      stop = options_.stop && options_.stop();
      if (world_ == nullptr) return;
      stop = sum_over_ranks(*world_, std::vector<std::int64_t>{stop ? 1 : 0}).front() > 0;
    });
    return stop;
  }

  [[nodiscard]] bool is_due(std::int64_t every) const {
    return result_.steps == config_.schedule.steps || (every > 0 && result_.steps % every == 0);
  }

  StepRecord step(std::int64_t index) {
    const auto start = Clock::now();
    StepRecord record;
    record.step = index + 1;
    record.learning_rate = learning_rate(config_.schedule, index);
    result_.not_finite.reset();
    StepStats stats;
    if (device_of() != nullptr) {
      device_step(index, stats, record);
      record.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      result_.seconds += record.seconds;
      rate(stats, record);
      return record;
    }
    const bool sound = gradients(index, stats, record);
    if (sound) {
      record.norm = replicas_.step(record.learning_rate);
      if (std::isfinite(record.norm)) {
        replicas_.on_each([&](int rank) {
          replicas_.model(rank).parameters_changed();
          replicas_.model(rank).update_routers(stats);
        });
      } else if (!find_in("gradient")) {
        blame_loss("the gradients' norm overflows");
      }
    }
    if (result_.not_finite) {
      record.skipped = options_.on_nan == OnNan::kSkip && result_.not_finite->what != "weight";
    }
    record.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    result_.seconds += record.seconds;
    rate(stats, record);
    return record;
  }

  /// A step on a GPU. While it runs the next one's batch is drawn.
  void device_step(std::int64_t index, StepStats& stats, StepRecord& record) {
    if (drawn_ != index) draw(index);
    const std::int64_t bytes = text_.bytes_of(batch_.targets);
    const DeviceStepArgs args{
        .tokens = {batch_.tokens.data(), {config_.sequences, batch_.length}},
        .targets = {batch_.targets.data(), {config_.sequences, batch_.length}},
        .calls = config_.accumulate,
        .step = static_cast<std::uint64_t>(index),
        .learning_rate = record.learning_rate};
    try {
      replicas_.on_each([&](int rank) { replicas_.model(rank).device()->start_step(args); });
      if (index + 1 < config_.schedule.steps) draw(index + 1);
      replicas_.on_each([&](int rank) {
        DeviceStepResult result = replicas_.model(rank).device()->finish_step();
        if (rank != replicas_.first()) return;
        stats = std::move(result.stats);
        record.norm = result.norm;
      });
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      record.loss = record.norm = std::nan("");
      if (find_in("weight")) return;
      if (result_.steps == result_.first_step) throw;
      return blame_loss(error.what());
    }
    record.loss = stats.nll / static_cast<double>(bytes);
    if (std::isfinite(record.loss) && std::isfinite(record.norm)) return;
    if (!find_in("weight") && !find_in("gradient")) {
      blame_loss(std::isfinite(record.loss) ? "the gradients' norm overflows" : "");
    }
    if (result_.not_finite) {
      record.skipped = options_.on_nan == OnNan::kSkip && result_.not_finite->what != "weight";
    }
  }

  void draw(std::int64_t index) {
    draw_batch(text_, config_.seed, index, config_.sequences, config_.model.sequence, batch_);
    drawn_ = index;
  }

  /// All calls of a step. False: something was not finite, and nothing may be changed.
  bool gradients(std::int64_t index, StepStats& stats, StepRecord& record) {
    draw(index);
    try {
      replicas_.on_each([&](int rank) { gradients_of(rank, index, stats); });
    } catch (const Error& error) {
      // Routers refuse logits that are not numbers. What the first step refuses for other reasons
      // is an error like any other.
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      record.loss = record.norm = std::nan("");
      if (find_in("weight")) return false;
      if (result_.steps == result_.first_step) throw;
      blame_loss(error.what());
      return false;
    }
    record.loss = stats.nll / static_cast<double>(text_.bytes_of(batch_.targets));
    if (std::isfinite(record.loss)) return true;
    record.norm = std::nan("");
    if (!find_in("weight") && !find_in("gradient")) blame_loss("");
    return false;
  }

  /// Of a rank's sequences: neighbouring ones of each call.
  void gradients_of(int rank, std::int64_t index, StepStats& stats) {
    const std::int64_t rows = config_.sequences / config_.accumulate / replicas_.size();
    const std::int64_t tokens = rows * batch_.length;
    StepStats of_others;  // the same numbers
    for (std::int64_t call = 0; call < config_.accumulate; ++call) {
      const std::int64_t first = (call * replicas_.size() + rank) * tokens;
      const auto part = [&](const std::vector<std::int32_t>& ids) {
        return Matrix<const std::int32_t>{ids.data() + first, {rows, batch_.length}};
      };
      replicas_.model(rank).loss_and_gradients(
          {.tokens = part(batch_.tokens),
           .targets = part(batch_.targets),
           .scale = 1.0 / static_cast<double>(config_.accumulate),
           .accumulate = call > 0,
           .step = static_cast<std::uint64_t>(index),
           .first_token = first,
           .stats = rank == replicas_.first() ? &stats : &of_others});
    }
    replicas_.model(rank).sum_gradients();
  }

  double held_out_loss() {
    const std::int64_t rows = config_.sequences / config_.accumulate;  // as much memory as a call
    double loss = 0;
    replicas_.on_each([&](int rank) {
      const Score score = evaluate(replicas_.model(rank), *valid_, {.sequences = rows}).all;
      if (rank == replicas_.first()) loss = score.nats_per_byte();
    });
    return loss;
  }

  [[nodiscard]] DeviceModel* device_of() { return replicas_.model().device(); }

  bool find_in(const char* what) {
    const bool gradients = std::string_view(what) == "gradient";
    if (device_of() != nullptr) {
      replicas_.on_each([&](int rank) {
        DeviceModel& device = *replicas_.model(rank).device();
        gradients ? device.download_gradients() : device.download_values();
      });
    }
    const auto found = replicas_.find_non_finite(gradients);
    if (!found) return false;
    result_.not_finite = NotFinite{result_.steps + 1, layer_of(found->tensor), what, *found};
    return true;
  }

  /// Weights and gradients are finite, but not the loss, or the sum of the gradients' squares.
  void blame_loss(std::string_view why) {
    result_.not_finite = NotFinite{result_.steps + 1, -1, "loss", {std::string(why), 0, NAN}};
  }

  void rate(const StepStats& stats, StepRecord& record) const {
    if (record.seconds > 0) {
      record.tokens_per_s = static_cast<double>(config_.sequences * batch_.length) / record.seconds;
      if (options_.peak_flops > 0) {
        record.share = flops_per_step_ / record.seconds / options_.peak_flops;
      }
    }
    rate_loads(stats, config_.sequences * batch_.length, record);
    if (!config_.model.capacity_factor) return;
    std::int64_t all = 0;
    std::int64_t kept = 0;
    for (const RoutingStats& layer : stats.layers) {
      for (const std::int64_t n : layer.counts) all += n;
      for (const std::int64_t n : layer.counts_kept) kept += n;
    }
    if (all > 0) record.dropped = 1 - static_cast<double>(kept) / static_cast<double>(all);
  }

  void save() {
    if (device_of() != nullptr) {
      replicas_.on_each([&](int rank) {
        DeviceModel& device = *replicas_.model(rank).device();
        device.download_values();
        device.download_moments(replicas_.optimizer(rank));
      });
    }
    const auto write = [&](const std::filesystem::path& hidden) {
      if (!hidden.empty()) write_tokenizer(text_.tokenizer(), hidden);
      write_checkpoint(replicas_, run_, result_.steps, hidden);
    };
    together(world_, [&] {
      if (!directory_) return write({});  // its share, to the rank that has the directory
      log_->sync();
      directory_->save(result_.steps, write);
      directory_->prune(options_.keep);
    });
    result_.checkpoint = options_.directory / checkpoint_name(result_.steps);
  }

  const TrainConfig& config_;
  const Text& text_;
  const Text* valid_;
  const TrainOptions& options_;
  TrainResult result_;
  Communicator* world_;  ///< Of processes; null: all ranks are here.
  nlohmann::json run_;
  std::unique_ptr<RunDirectory> directory_;  ///< With log_ on the first rank alone.
  Replicas replicas_;
  double flops_per_step_;
  std::optional<LogFile> log_;
  Batch batch_;
  std::int64_t drawn_ = -1;  ///< The step whose batch it is.
};

}  // namespace

void check(const TrainConfig& config, const Text& text) {
  check(config);
  check_vocabulary(config.model.vocabulary, text);
  require(text.longest() >= config.model.sequence,
          "sequences of {} {} want a document of {}, the longest of the text has {}",
          config.model.sequence, text.unit(), config.model.sequence + 1, text.longest() + 1);
}

std::string NotFinite::text() const {
  const std::string at = fmt::format("step {}: ", step);
  if (what == "loss") {
    return at + "the loss is not finite" + (where.tensor.empty() ? "" : ": " + where.tensor);
  }
  return at + (layer < 0 ? "" : fmt::format("layer {}: ", layer)) +
         fmt::format("{} of {} has {} at {}", what, where.tensor, where.value, where.index);
}

TrainResult train(const TrainConfig& config, const Text& text, const Text* valid,
                  const TrainOptions& options) {
  const int ranks = num_ranks_of(options);
  if (options.communicator != nullptr) options.communicator->set_timeout(options.timeout);
  together(world_of(options), [&] {
    require(options.communicator == nullptr || options.ranks == 1 || options.ranks == ranks,
            "{} ranks, but the communicator has {}", options.ranks, ranks);
    require(!options.measure || ranks == 1, "what `measure` says is of one rank, not of {}", ranks);
    check(config, ranks);
    check(config, text);
  });
  return Run(config, text, valid, options).train();
}

}  // namespace switchyard::models
