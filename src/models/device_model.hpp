#pragma once

// A model whose parameters and moments lie on a GPU, as Model and the trainer see it. Host memory
// has copies of them that are read and written when somebody asks.

#include <memory>
#include <span>

#include "models/cache_state.hpp"
#include "models/parameters.hpp"
#include "switchyard/models/model.hpp"
#include "switchyard/models/optimizer.hpp"

namespace switchyard::models {

/// @throws Error{kUnsupported}: what a GPU's model does not know of, by its name.
void refuse_on_gpu(const ModelConfig& config);

/// A step of training: gradients of all sequences, and the optimiser's change.
struct DeviceStepArgs {
  Matrix<const std::int32_t> tokens{};   ///< [B, S], of all ranks.
  Matrix<const std::int32_t> targets{};  ///< [B, S].
  std::int64_t calls = 1;                ///< Divides B; over R ranks R times that does.
  std::uint64_t step = 0;
  double learning_rate = 0;
};

/// What it came to.
struct DeviceStepResult {
  StepStats stats{};
  double norm = 0;  ///< Of the gradients before clipping. Not finite: nothing was changed.
};

class DeviceModel {
 public:
  virtual ~DeviceModel() = default;
  /// Values on the host are newer than those on the GPU.
  virtual void values_changed() = 0;
  /// As Model's, whose checks are made. loss_and_gradients() leaves gradients on the host too.
  virtual void forward(Matrix<const std::int32_t> tokens, Matrix<float> logits) = 0;
  virtual double evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                          Matrix<float> nll) = 0;
  /// @param targets  That the call has, on all ranks.
  virtual double loss_and_gradients(const StepArgs& args, std::int64_t targets) = 0;
  /// Over ranks, where this one has no tokens: its experts have those of others.
  virtual void serve_experts() = 0;
  virtual void update_routers(const StepStats& stats) = 0;

  [[nodiscard]] virtual std::unique_ptr<DeviceCache> make_cache(std::int64_t batch,
                                                                std::int64_t positions) = 0;
  /// As Model's, behind the `length` positions that are there.
  virtual void decode(Matrix<const std::int32_t> tokens, DeviceCache& cache, std::int64_t length,
                      Matrix<float> logits) = 0;
  /// Enqueues a step of one token of each sequence at `position`, and waits for nothing. @param
  /// tokens  [B], in the vocabulary; or null: the likeliest ones of the step before, which may
  /// still be under way, at most three of them.
  virtual void start_token(const std::int32_t* tokens, DeviceCache& cache,
                           std::int64_t position) = 0;
  /// Waits for the oldest step under way. @returns [B] the likeliest tokens behind it, as sample()
  /// at temperature 0; -1: not all logits are numbers. Until the next start_token().
  /// @throws Error{kInvalidArgument}: a router's logits are not numbers.
  virtual std::span<const std::int32_t> finish_token(DeviceCache& cache) = 0;

  /// Moments and the number of steps as `optimizer` has them, whose configuration holds from now
  /// on.
  virtual void upload_moments(AdamW& optimizer) = 0;
  /// The other way.
  virtual void download_moments(AdamW& optimizer) = 0;
  /// Values and buffers to the host.
  virtual void download_values() = 0;
  virtual void download_gradients() = 0;
  /// Enqueues a step and waits for nothing; upload_moments() was called. Over ranks the sums of
  /// gradients are a part of it.
  virtual void start_step(const DeviceStepArgs& args) = 0;
  /// Waits for it. Over ranks collective: what it says is of all. @throws Error{kInvalidArgument}:
  /// a router's logits are not numbers.
  virtual DeviceStepResult finish_step() = 0;
};

/// @throws Error{kUnsupported}: built without CUDA; what the GPU's model does not do, by name;
///         {kDevice}: no GPU.
[[nodiscard]] std::unique_ptr<DeviceModel> make_device_model(const ModelConfig& config,
                                                             const ModelOptions& options,
                                                             const Parameters& parameters);

}  // namespace switchyard::models
