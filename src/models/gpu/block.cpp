#include "models/gpu/block.hpp"

#include <variant>

#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "layer/saved_forward.hpp"
#include "models/layer_arguments.hpp"
#include "models/over_ranks.hpp"

namespace switchyard::models::gpu {

DeviceBlock::DeviceBlock(const ModelConfig& config, const ModelOptions& options,
                         const DeviceParameters& parameters, std::int32_t layer,
                         const BlockScratch& scratch)
    : config_(config),
      options_(options),
      parameters_(&parameters),
      scratch_(scratch),
      tensors_(parameters.host().layer(layer)),
      layer_(layer),
      dense_(config.is_dense(layer)),
      ranks_(dense_ ? nullptr : ranks_of(options)),
      what_(dense_ ? dense_config(config) : layer_config(config)),
      saved_(options.recompute ? Recompute::kActivationInput : Recompute::kNone) {
  if (!dense_ && (std::holds_alternative<ExpertThresholdRouter>(what_.router.kind) ||
                  std::holds_alternative<ReluRouter>(what_.router.kind))) {
    fail(ErrorCode::kUnsupported,
         "the router {} of a model on a GPU: what moves with its steps is made on a CPU so far",
         config.router);
  }
  training_.emplace(layer_model(), layer_options(true), ranks_);
}

bool DeviceBlock::may_be_captured(bool training) const {
  if (dense_) return true;
  const RouterConfig& router = what_.router;
  const bool draws_nothing = router.is_top_k() || std::holds_alternative<HashRouter>(router.kind) ||
                             std::holds_alternative<ExpertChoiceRouter>(router.kind);
  return draws_nothing && (!training || router.noise.kind == RouterNoise::Kind::kNone);
}

LayerModel DeviceBlock::layer_model() const {
  const DeviceParameters& p = *parameters_;
  LayerModel model{.config = what_};
  const std::int64_t gate = what_.router.gate_rows() * config_.hidden;
  model.gate = parameter(p.value(tensors_.gate), gate, Backend::kCuda);
  model.noise_gate = parameter(p.value(tensors_.noise_gate), gate, Backend::kCuda);
  model.selection_bias = parameter(p.buffer(tensors_.bias), config_.experts, Backend::kCuda);
  const auto source = [&](const ExpertConfig& experts, std::int64_t w13, std::int64_t w2) {
    return make_device_source(experts, options_.compute, p.typed(w13).data, p.typed(w2).data,
                              nullptr, nullptr);
  };
  ExpertConfig own = what_.experts;
  if (ranks_ != nullptr) own.num_experts = experts_of(config_, options_).count;
  model.experts = source(own, tensors_.w13, tensors_.w2);
  if (what_.shared.num_experts > 0) {
    model.shared = source(what_.shared, tensors_.shared_w13, tensors_.shared_w2);
  }
  model.shared_gate = parameter(p.value(tensors_.shared_gate), config_.hidden, Backend::kCuda);
  return model;
}

LayerOptions DeviceBlock::layer_options(bool training) const {
  LayerOptions options;
  options.backend = Backend::kCuda;
  options.compute = options_.compute;
  options.max_tokens = options_.max_tokens;
  options.combine_wire = options_.compute;  // what comes out is rounded to it
  options.scratch = training ? scratch_.training : scratch_.inference;
  if (training && !dense_) {
    options.capacity_factor = config_.capacity_factor;
    options.drop_policy = config_.drop_policy;
    options.losses = config_.losses;
    // Over ranks a batch is what all of them have, and only counts of all make it so.
    if (ranks_ != nullptr && options.losses.scope == LossScope::kBatch) {
      options.losses.scope = LossScope::kGlobal;
    }
  }
  return options;
}

MoeLayer& DeviceBlock::layer_for(bool training) {
  const bool both = dense_ || !config_.capacity_factor;
  if (training || both) return *training_;
  if (!inference_) inference_.emplace(layer_model(), layer_options(false), ranks_);
  return *inference_;
}

void DeviceBlock::give_routing(ForwardArgs& args) {
  const std::int64_t num_tokens = args.tokens.rows;
  if (one_expert_.bytes() < 4 * num_tokens) {
    one_expert_.reserve(4 * num_tokens);  // zeros
    const std::vector<float> ones(static_cast<std::size_t>(num_tokens), 1.0F);
    copy_to_device(one_weight_.reserve(4 * num_tokens), ones.data(), 4 * ones.size());
  }
  args.expert = {reinterpret_cast<const std::int32_t*>(one_expert_.data()), {num_tokens, 1}};
  args.weight = {reinterpret_cast<const float*>(one_weight_.data()), {num_tokens, 1}};
}

void DeviceBlock::forward(const BlockCall& call, const BlockRecord* record) {
  ForwardArgs args{.tokens = call.x, .out = call.out, .stream = call.stream};
  if (dense_) {
    give_routing(args);
  } else if (call.expert != nullptr) {
    const std::int64_t top_k = what_.router.top_k();
    args.expert = {call.expert, {call.x.rows, top_k}};
    args.weight = {call.share, {call.x.rows, top_k}};
  } else {
    args.request.token_ids = {call.ids, {call.x.rows}};
    args.request.seed = options_.seed;
    args.request.step = call.step;
    args.request.layer = layer_;
    args.request.first_token = call.first_token;
    args.request.training = call.training;
  }
  if (call.training) {
    args.saved = &saved_;
    args.tokens_stay = true;
  }
  layer_for(call.training).forward(args);
  if (!call.training || dense_ || record == nullptr) return;
  if (ranks_ == nullptr) record_losses(*record, call.stream);
  if (!what_.router.is_chain()) return count(saved_.state(), *record, call.stream);
  for (SavedForward& iteration : saved_.state().iterations) {
    count(iteration.state(), *record, call.stream);
  }
}

void DeviceBlock::count(const SavedForward::State& saved, const BlockRecord& record,
                        cudaStream_t stream) const {
  count_experts({.expert = saved.expert.data,
                 .kept = config_.capacity_factor ? saved.kept.data : nullptr,
                 .assignments = saved.expert.size(),
                 .experts = config_.experts,
                 .counts = record.counts,
                 .counts_kept = record.counts_kept,
                 .stream = stream});
}

void DeviceBlock::record_losses(const BlockRecord& record, cudaStream_t stream) const {
  const Vector<const double> losses = saved_.losses();
  if (losses.data == nullptr) return;
  SWITCHYARD_CUDA(cudaMemcpyAsync(record.losses, losses.data, 8 * std::size_t{kLossValues},
                                  cudaMemcpyDeviceToDevice, stream));
}

ExpertGradients DeviceBlock::expert_gradients(std::int64_t w13, std::int64_t w2) const {
  if (w13 < 0) return {};
  const auto& tensors = parameters_->host().tensors();
  const ParameterTensor& first = tensors[static_cast<std::size_t>(w13)];
  const ParameterTensor& second = tensors[static_cast<std::size_t>(w2)];
  return {.w13 = raw(parameters_->gradient(w13), first.shape[0] * first.shape[1], first.shape[2]),
          .w2 = raw(parameters_->gradient(w2), second.shape[0] * second.shape[1], second.shape[2])};
}

void DeviceBlock::backward(RawMatrix dout, RawMatrix dx, double scale, bool accumulate,
                           const BlockRecord& record, cudaStream_t stream) {
  const DeviceParameters& p = *parameters_;
  const std::int64_t gate_rows = what_.router.gate_rows();
  BackwardArgs args{.saved = &saved_,
                    .dout = dout,
                    // The mean over ranks, of which each makes its own part.
                    .loss_scale = ranks_ == nullptr ? scale : scale / ranks_->size(),
                    .dtokens = dx,
                    .dgate = raw(p.gradient(tensors_.gate), gate_rows, config_.hidden),
                    .dnoise_gate = raw(p.gradient(tensors_.noise_gate), gate_rows, config_.hidden),
                    .experts = expert_gradients(tensors_.w13, tensors_.w2),
                    .shared = expert_gradients(tensors_.shared_w13, tensors_.shared_w2),
                    .accumulate = accumulate,
                    .stream = stream};
  if (tensors_.shared_gate >= 0) {
    args.dshared_gate = {p.gradient(tensors_.shared_gate), {config_.hidden}};
  }
  training_->backward(args);
  if (ranks_ != nullptr) record_losses(record, stream);
}

void DeviceBlock::update_bias(const std::int64_t* counts, const StepFactors* factors,
                              cudaStream_t stream) {
  if (!has_bias()) return;
  move_bias(counts, config_.experts, config_.bias_rate, factors, parameters_->buffer(tensors_.bias),
            stream);
}

void DeviceBlock::check() {
  training_->check();
  if (inference_) inference_->check();
}

}  // namespace switchyard::models::gpu
