#include "models/soft_block.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/row_ops.hpp"
#include "experts/implementations.hpp"
#include "models/layer_arguments.hpp"

namespace switchyard::models {

SoftBlock::SoftBlock(const ModelConfig& config, const ModelOptions& options,
                     const Parameters& parameters, const LayerTensors& tensors, ThreadPool* threads)
    : what_(*soft_moe_config(config)),
      experts_({.num_experts = config.experts, .hidden = config.hidden, .inner = config.inner}),
      compute_(options.compute),
      parameters_(&parameters),
      tensors_(tensors),
      threads_(threads),
      saved_(options.recompute ? Recompute::kActivationInput : Recompute::kNone),
      hidden_(config.hidden) {
  if (!what_.causal) what_.group = 0;  // a sequence, also one that is shorter than the model's
}

LoadExpertsArgs SoftBlock::load_args(const ExpertSource& source) const {
  return {.config = experts_,
          .source = &source,
          .dtype = compute_,
          .num_local = experts_.num_experts,
          .execution = {.pool = threads_}};
}

void SoftBlock::load() {
  if (!stale_) return;
  const auto source = make_memory_source(experts_, DType::kF32, parameters_->value(tensors_.w13),
                                         parameters_->value(tensors_.w2));
  std::unique_ptr<ExpertWeights> weights = std::move(weights_);
  if (weights == nullptr) {
    weights = load_experts(load_args(*source));
  } else {
    reload_experts_cpu(load_args(*source), *weights);
  }
  weights_ = std::move(weights);
  stale_ = false;
}

SoftMoeConfig SoftBlock::config_of_call() const {
  SoftMoeConfig config = what_;
  config.sequence = padded_;
  config.scale = *parameters_->value(tensors_.phi_scale);
  return config;
}

ConstRawMatrix SoftBlock::phi() const {
  return raw(static_cast<const float*>(parameters_->value(tensors_.phi)),
             experts_.num_experts * what_.slots, hidden_);
}

const float* SoftBlock::in_groups(const float* rows, Floats& room) const {
  if (!has_ends()) return rows;
  float* const out = room.reserve(sequences_ * padded_ * hidden_);
  for (std::int64_t b = 0; b < sequences_; ++b) {
    float* const to = out + b * padded_ * hidden_;
    std::copy_n(rows + b * positions_ * hidden_, positions_ * hidden_, to);
    std::fill_n(to + positions_ * hidden_, (padded_ - positions_) * hidden_, 0.0F);
  }
  return out;
}

void SoftBlock::out_of_groups(const float* padded, float* rows) const {
  if (!has_ends()) return;
  for (std::int64_t b = 0; b < sequences_; ++b) {
    std::copy_n(padded + b * padded_ * hidden_, positions_ * hidden_,
                rows + b * positions_ * hidden_);
  }
}

void SoftBlock::forward(Matrix<const float> x, std::int64_t positions,
                        const std::optional<ReadBefore>& before, bool training, Matrix<float> out) {
  require(positions > 0 && x.shape[0] % positions == 0, "{} tokens are no sequences of {}",
          x.shape[0], positions);
  load();
  const std::int64_t sequences = x.shape[0] / positions;
  if (!before) return mix(x.data, sequences, positions, training, out.data);
  mix_behind(x.data, sequences, positions, *before, out.data);
}

void SoftBlock::mix_behind(const float* x, std::int64_t sequences, std::int64_t positions,
                           const ReadBefore& before, float* out) {
  const std::int64_t end = before.length + positions, added = positions * hidden_;
  // From the group before that of the first token on.
  const std::int64_t first =
      std::max<std::int64_t>(0, before.length / what_.group - 1) * what_.group;
  const std::int64_t length = (end - first) * hidden_;
  float* const rows = read_.reserve(sequences * length);
  float* const made = made_.reserve(sequences * length);
  for (std::int64_t b = 0; b < sequences; ++b) {
    float* const sequence = before.rows + b * before.capacity * hidden_;
    std::copy_n(x + b * added, added, sequence + before.length * hidden_);
    std::copy_n(sequence + first * hidden_, length, rows + b * length);
  }
  mix(rows, sequences, end - first, false, made);
  for (std::int64_t b = 0; b < sequences; ++b) {
    std::copy_n(made + (b + 1) * length - added, added, out + b * added);
  }
}

void SoftBlock::mix(const float* x, std::int64_t sequences, std::int64_t positions, bool training,
                    float* out) {
  sequences_ = sequences;
  positions_ = positions;
  padded_ = what_.causal ? (positions + what_.group - 1) / what_.group * what_.group : positions;
  const std::int64_t num_rows = sequences_ * padded_;
  const float* const rows = in_groups(x, x_);
  ConstRawMatrix operands = raw(rows, num_rows, hidden_);
  if (compute_ != DType::kF32) {
    const std::int64_t row_bytes = hidden_ * size_of(compute_);
    rounded_.reserve(static_cast<std::size_t>(num_rows * row_bytes));
    parallel_for(threads_, num_rows, [&](std::int64_t r, int) {
      row_ops::narrow(compute_, rows + r * hidden_, rounded_.data() + r * row_bytes, hidden_);
    });
    operands = {rounded_.data(), compute_, num_rows, hidden_};
  }
  float* const y = has_ends() ? y_.reserve(num_rows * hidden_) : out;
  soft_moe({.x = operands,
            .phi = phi(),
            .weights = weights_.get(),
            .config = config_of_call(),
            .out = raw(y, num_rows, hidden_),
            .saved = training ? &saved_ : nullptr,
            .execution = {.pool = threads_}});
  out_of_groups(y, out);
}

void SoftBlock::backward(Matrix<const float> dout, Matrix<float> dx, bool accumulate) {
  const std::int64_t num_rows = sequences_ * padded_;
  float* const dphi = parameters_->gradient(tensors_.phi);
  float* const to = has_ends() ? dx_.reserve(num_rows * hidden_) : dx.data;
  soft_moe_backward({.saved = &saved_,
                     .phi = phi(),
                     .weights = weights_.get(),
                     .dout = raw(in_groups(dout.data, y_), num_rows, hidden_),
                     .dx = raw(to, num_rows, hidden_),
                     .dphi = raw(dphi, experts_.num_experts * what_.slots, hidden_),
                     .dscale = parameters_->gradient(tensors_.phi_scale),
                     .experts = expert_gradients(*parameters_, tensors_.w13, tensors_.w2),
                     .accumulate = accumulate,
                     .execution = {.pool = threads_}});
  out_of_groups(to, dx.data);
}

std::int64_t SoftBlock::rows_of_expert() const {
  const std::int64_t group = what_.group == 0 ? padded_ : what_.group;
  const std::int64_t groups = padded_ / group - (what_.causal ? 1 : 0);
  return sequences_ * groups * what_.slots;
}

}  // namespace switchyard::models
