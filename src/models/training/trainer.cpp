// A run: batch, gradients, optimiser, log, checkpoint, step after step.
#include "switchyard/models/trainer.hpp"

#include <fmt/core.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

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
        directory_(options.directory),
        replicas_(config, options),
        run_(run_json(config, text)),
        flops_per_step_(count(config.model).flops_per_token *
                        static_cast<double>(config.sequences * config.model.sequence)),
        log_(directory_.path() / "log.jsonl", begin()) {
    if (DeviceModel* const device = device_of()) device->upload_moments(replicas_.optimizer());
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
      }
      log_.append(record);
      result_.last = record;
      if (options_.on_step) options_.on_step(record);
      const bool stop = result_.steps < steps && options_.stop && options_.stop();
      if (stop || is_due(options_.save_every)) save();
      if (stop) {
        result_.end = TrainResult::End::kInterrupted;
        break;
      }
    }
    log_.sync();
    return result_;
  }

 private:
  /// What is there of the run: the steps that the newest checkpoint has.
  std::int64_t begin() {
    const std::vector<std::int64_t> steps = checkpoint_steps(directory_.path());
    const std::string name = directory_.path().string();
    require(steps.empty() || options_.resume,
            "{} has a run already, of {} steps: resume it, or take another directory", name,
            steps.empty() ? 0 : steps.back());
    if (steps.empty()) {
      if (!config_.init.empty()) replicas_.load_values(model_directory(config_.init));
      return 0;
    }
    result_.checkpoint = directory_.checkpoint(steps.back());
    result_.steps = read_checkpoint(replicas_, run_, result_.checkpoint);
    require(result_.steps == steps.back(), "{} is of step {}", result_.checkpoint.string(),
            result_.steps);
    result_.first_step = result_.steps;
    return result_.steps;
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
    DeviceModel& device = *device_of();
    if (drawn_ != index) draw(index);
    try {
      device.start_step({.tokens = {batch_.tokens.data(), {config_.sequences, batch_.length}},
                         .targets = {batch_.targets.data(), {config_.sequences, batch_.length}},
                         .calls = config_.accumulate,
                         .step = static_cast<std::uint64_t>(index),
                         .learning_rate = record.learning_rate});
      if (index + 1 < config_.schedule.steps) draw(index + 1);
      const DeviceStepResult result = device.finish_step();
      stats = result.stats;
      record.norm = result.norm;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      record.loss = record.norm = std::nan("");
      if (find_in("weight")) return;
      if (result_.steps == result_.first_step) throw;
      return blame_loss(error.what());
    }
    record.loss = stats.nll / static_cast<double>(stats.targets);
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
    record.loss = stats.nll / static_cast<double>(stats.targets);
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
           .stats = rank == 0 ? &stats : &of_others});
    }
    replicas_.model(rank).sum_gradients();
  }

  double held_out_loss() {
    const std::int64_t rows = config_.sequences / config_.accumulate;  // as much memory as a call
    double loss = 0;
    replicas_.on_each([&](int rank) {
      const Score score = evaluate(replicas_.model(rank), *valid_, {.sequences = rows}).all;
      if (rank == 0) loss = score.nats_per_byte();
    });
    return loss;
  }

  [[nodiscard]] DeviceModel* device_of() { return replicas_.model().device(); }

  bool find_in(const char* what) {
    const bool gradients = std::string_view(what) == "gradient";
    if (DeviceModel* const device = device_of()) {
      gradients ? device->download_gradients() : device->download_values();
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
    log_.sync();
    if (DeviceModel* const device = device_of()) {
      device->download_values();
      device->download_moments(replicas_.optimizer());
    }
    directory_.save(result_.steps, [&](const std::filesystem::path& hidden) {
      write_checkpoint(replicas_, run_, result_.steps, hidden);
    });
    result_.checkpoint = directory_.checkpoint(result_.steps);
    directory_.prune(options_.keep);
  }

  const TrainConfig& config_;
  const Text& text_;
  const Text* valid_;
  const TrainOptions& options_;
  TrainResult result_;
  RunDirectory directory_;
  Replicas replicas_;
  nlohmann::json run_;
  double flops_per_step_;
  LogFile log_;
  Batch batch_;
  std::int64_t drawn_ = -1;  ///< The step whose batch it is.
};

}  // namespace

void check(const TrainConfig& config, const Text& text) {
  check(config);
  require(text.longest() >= config.model.sequence,
          "sequences of {} bytes want a document of {}, the longest of the text has {}",
          config.model.sequence, config.model.sequence + 1, text.longest() + 1);
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
  check(config, options.ranks);
  check(config, text);
  if (options.ranks > 1 && options.backend == Backend::kCuda) {
    fail(ErrorCode::kUnsupported, "training on a GPU runs on one rank so far, not on {}",
         options.ranks);
  }
  return Run(config, text, valid, options).train();
}

}  // namespace switchyard::models
