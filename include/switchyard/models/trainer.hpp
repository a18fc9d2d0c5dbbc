#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/models/config.hpp"
#include "switchyard/models/model.hpp"
#include "switchyard/models/optimizer.hpp"
#include "switchyard/models/text.hpp"

namespace switchyard::models {

/// All that decides the bytes of a run's checkpoints, besides the text.
struct TrainConfig {
  ModelConfig model{};
  std::uint64_t seed = 0;       ///< Of initial values, batches, and what routers draw.
  std::int64_t sequences = 1;   ///< Of a step, each of ModelConfig::sequence tokens.
  std::int64_t accumulate = 1;  ///< Calls of a step; divides `sequences`. Less memory.
  Schedule schedule{};          ///< Its `steps` are the run's.
  AdamWConfig adamw{};
  DType compute = DType::kF32;  ///< ModelOptions::compute.
  /// Groups that stay as they are at the start: no gradient, no update, no decay, no part in the
  /// norm. "Learning to specialize" (arXiv:2306.08586) compares joint training with a frozen router
  /// and with frozen experts.
  std::vector<Group> freeze{};
  /// A run or a checkpoint that begins with: values of all tensors and buffers; moments and steps
  /// begin anew. Empty: those of the seed. Of a model with adapters their base, and adapters begin
  /// anew; or a run with the same adapters, which go on.
  std::filesystem::path init{};
};

/// @throws Error{kInvalidArgument} that names the value which breaks a rule; a frozen group that
/// the
///         model has nothing of; a frozen router with a loss or a balancing that would move it;
///         adapters with `freeze` or with a loss of the routers beside them.
void check(const TrainConfig& config);
/// What no step moves: `freeze`; of a model with adapters all groups but theirs.
[[nodiscard]] std::vector<Group> frozen_groups(const TrainConfig& config);
/// Also that it can begin: over so many ranks, and adapters with a base, `init`.
/// @throws Error{kInvalidArgument}, {kUnsupported}.
void check(const TrainConfig& config, int ranks);
/// Also that the text has tokens of the vocabulary, and a sequence of them. @throws
/// Error{kInvalidArgument}.
void check(const TrainConfig& config, const Text& text);

/// What is done where a loss, a gradient or a weight is not finite.
enum class OnNan : std::uint8_t {
  kStop,  ///< The run ends before the step changes anything.
  kSkip,  ///< The step changes nothing and the next begins; weights that are not finite end it.
};

/// One line of DIR/log.jsonl.
struct StepRecord {
  std::int64_t step = 0;  ///< 1 for the first.
  double loss = 0;        ///< Mean nats a byte before the step's change, without router losses.
  double norm = 0;        ///< Of the gradients before clipping.
  double learning_rate = 0;
  double seconds = 0;
  double tokens_per_s = 0;
  std::optional<double> share{};    ///< Useful operations a second by TrainOptions::peak_flops.
  std::optional<double> load_cv{};  ///< Mean over MoE layers of deviation / mean of the loads.
  std::optional<double> max_vio{};  ///< Likewise of the largest load / mean, less 1.
  std::optional<double> picks{};    ///< Likewise of experts that computed a token, behind drops.
  std::optional<double> dropped{};  ///< Share of all assignments, with a capacity.
  bool skipped = false;
  std::optional<double> valid_loss{};  ///< Nats a byte of the held-out text, where it was measured.
  std::map<std::string, double> measured{};  ///< By TrainOptions::measure, by name.
};

/// What a number that is not finite was found in.
struct NotFinite {
  std::int64_t step = 0;
  std::int32_t layer = -1;  ///< -1: no layer's.
  std::string what{};       ///< "weight", "gradient", or "loss", which has no tensor.
  NonFinite where{};

  /// "step 12: layer 0: gradient of model.layers.0.mlp.gate.weight has nan at 17".
  [[nodiscard]] std::string text() const;
};

struct TrainOptions {
  Backend backend = Backend::kCpu;    ///< ModelOptions::backend.
  std::filesystem::path directory{};  ///< Of the run.
  bool resume = false;                ///< Go on, where there is a checkpoint; else begin.
  std::int64_t save_every = 0;        ///< Steps; 0: only at the end.
  std::int64_t keep = 0;              ///< Newest checkpoints that stay; 0: all.
  std::int64_t valid_every = 0;       ///< Steps; 0: only at the end.
  OnNan on_nan = OnNan::kStop;
  /// Ranks, which are threads of this process: each has a share of the experts and of a call's
  /// sequences; CUDA: and a GPU, in turns. Losses are those of one rank but for the last bits, and
  /// so may resume with another number. What over ranks is refused check_ranks() says.
  int ranks = 1;
  /// Instead of threads: this process's rank among those of a launcher, which all call train() with
  /// the same; `ranks` is 1 or its size. Rank 0 writes; the others read checkpoints and `init`, so
  /// all see these directories. What one rank meets, all throw, as CommonError of
  /// comm/ranks/together.hpp.
  Communicator* communicator = nullptr;
  /// How long a rank waits for another, the writing of a checkpoint included; one that fails is
  /// known at once.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  int num_threads = 1;  ///< Of all ranks of this process; each has at least one.
  bool recompute = false;
  double peak_flops = 0;  ///< Operations a second that the machine has; 0: not known.
  std::function<void(const StepRecord&)> on_step{};  ///< May be empty, as the next.
  std::function<void(std::int64_t step, std::int64_t of)> on_batch{};  ///< Before a step.
  /// What else is told of the model where the loss on held-out text is: numbers by names of their
  /// own for the log, a function of the model alone. One rank. May be empty.
  std::function<std::map<std::string, double>(Model&)> measure{};
  /// Asked after each step: true saves, and ends the run, of all processes if any says so.
  std::function<bool()> stop{};
};

struct TrainResult {
  enum class End : std::uint8_t { kFinished, kInterrupted, kNotFinite };
  End end = End::kFinished;
  std::int64_t first_step = 0;  ///< Steps that were done before: 0, or those of what was resumed.
  std::int64_t steps = 0;       ///< That are done now.
  std::int64_t skipped = 0;     ///< Of them in this call.
  double seconds = 0;           ///< Of this call's steps, without validation and checkpoints.
  StepRecord last{};
  std::optional<NotFinite> not_finite{};
  std::filesystem::path checkpoint{};  ///< The newest; empty: there is none.
};

/// Trains a model on text, in a run's directory:
///   step-000100/  config.json, model.safetensors (files.hpp), where tokens are not bytes
///                 tokenizer.model, and optimizer.safetensors: moments as "m.NAME" and "v.NAME"
///                 of what is not frozen, and "run", JSON with `step` and all of TrainConfig
///   log.jsonl     a line a step: members of StepRecord, `lr` for the learning rate
/// A checkpoint is written under a hidden name and renamed: whoever ends the process where, also by
/// a full disk, leaves the older ones as they were. Resuming takes the newest, cuts the log to its
/// step, and goes on with the same bytes of checkpoints as a run that was never interrupted, for
/// any number of threads: batches are a function of (seed, step), all sums have a fixed order. A
/// checkpoint is the same files for any number of ranks, and resumes with any. One process at a
/// time has the directory.
/// @param valid  Held-out text, or null.
/// @throws Error{kInvalidArgument}: of check(); vocabulary is not that of the text; a text too
/// short;
///         TrainOptions::measure with several ranks; the directory has a run and `resume` is not
///         set; resumed with another configuration, text or init, which it names; ranks do not
///         divide a call's sequences; {kUnsupported}: as check_ranks(), ranks on a GPU; {kBadFile}:
///         a damaged checkpoint or init, by file and tensor; {kIo}: the disk, or another process
///         has the directory; {kOutOfMemory}; {kTimeout}: a rank waited too long for another, all
///         have left and the checkpoints are as they were.
[[nodiscard]] TrainResult train(const TrainConfig& config, const Text& text, const Text* valid,
                                const TrainOptions& options);

/// What a checkpoint says of the run that wrote it.
struct CheckpointOrigin {
  std::int64_t step = 0;
  std::uint64_t seed = 0;  ///< TrainConfig::seed.
  bool has_init = false;   ///< The run began with another's weights, not with those of the seed.
};
/// Of a checkpoint's directory; nothing where it has no optimizer.safetensors, as save_model()
/// leaves it. @throws Error{kBadFile}: that file is damaged, or says no step or seed.
[[nodiscard]] std::optional<CheckpointOrigin> read_origin(const std::filesystem::path& directory);

/// Lets go of the optimiser's moments in the checkpoint that a run has ended with, two thirds of
/// its bytes where all tensors learn. It is loaded and says its origin as before, and train() with
/// `resume` takes it for the end that it is. Nothing to do where there are none.
/// @throws Error{kInvalidArgument}: the run has steps left; {kBadFile}: its file is damaged; {kIo}.
void drop_moments(const std::filesystem::path& directory);

/// Memory of a run by what it is for: bytes, of all ranks together.
struct TrainMemory {
  double weights = 0;      ///< Values, and what products take of them: packed, or of 16 bits.
  double gradients = 0;    ///< f32.
  double moments = 0;      ///< AdamW's two, of what learns.
  double activations = 0;  ///< What a call keeps for its way back, and works in.
  double exchange = 0;     ///< Between ranks.

  [[nodiscard]] double total() const {
    return weights + gradients + moments + activations + exchange;
  }
};

/// Where a run is, as far as its memory asks.
struct TrainPlace {
  int ranks = 1;
  Backend backend = Backend::kCpu;
  bool recompute = false;  ///< ModelOptions::recompute.
};

/// What a run will take, before it begins.
struct TrainEstimate {
  std::int64_t tokens = 0;
  double flops = 0;  ///< Useful ones: ModelCounts::flops_per_token, none for what is repeated.
  double seconds = 0;
  double bytes = 0;             ///< Of memory: its total.
  TrainMemory memory{};         ///< CUDA: of the GPUs.
  double checkpoint_bytes = 0;  ///< Of one checkpoint.
};

/// Share of the arithmetic peak that a step reaches on a CPU: what steps of the presets `smoke` and
/// `cpu-10min` had by their processor time on busy virtual cores (docs/models.md).
inline constexpr double kExpectedShare = 0.3;

/// @param steps  That are to be done. Time: operations by kExpectedShare of the peak, and the
///        optimiser's 32 bytes a parameter by the bandwidth, of what ranks have alike on each.
/// @throws Error{kUnsupported}: CUDA, what a model on a GPU does not have, by its name.
[[nodiscard]] TrainEstimate estimate_training(const TrainConfig& config, std::int64_t steps,
                                              double peak_flops, double bytes_per_s,
                                              const TrainPlace& place = {});

}  // namespace switchyard::models
