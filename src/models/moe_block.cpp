#include "models/moe_block.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "models/layer_arguments.hpp"
#include "models/over_ranks.hpp"
#include "switchyard/routing/relu_l1.hpp"
#include "switchyard/routing/selection_bias.hpp"

namespace switchyard::models {
namespace {

/// Of a chain's record, iteration after iteration [C, T, K]: [T, C*K], all of a token together.
template <typename T>
std::vector<T> side_by_side(std::vector<T> record, std::int64_t gates, std::int64_t num_tokens) {
  if (gates == 1 || record.empty()) return record;
  const std::int64_t each = std::ssize(record) / (gates * num_tokens);
  std::vector<T> out(record.size());
  for (std::int64_t c = 0; c < gates; ++c) {
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      std::copy_n(record.begin() + (c * num_tokens + t) * each, each,
                  out.begin() + (t * gates + c) * each);
    }
  }
  return out;
}

}  // namespace

MoeBlock::MoeBlock(const ModelConfig& config, const ModelOptions& options,
                   const Parameters& parameters, std::int32_t layer, ThreadPool* threads)
    : config_(config),
      options_(options),
      parameters_(&parameters),
      tensors_(parameters.layer(layer)),
      layer_(layer),
      dense_(config.is_dense(layer)),
      ranks_(dense_ ? nullptr : ranks_of(options)),
      saved_(options.recompute ? Recompute::kActivationInput : Recompute::kNone) {
  if (!dense_ && soft_moe_config(config)) {
    soft_.emplace(config, options, parameters, tensors_, threads);
    return;
  }
  what_ = dense_ ? dense_config(config) : layer_config(config);
  training_.layer.emplace(layer_model(), layer_options(true), ranks_);
  if (config.adapters && !dense_) {
    adapters_.emplace(config, options, parameters, tensors_, threads);
  }
}

LayerModel MoeBlock::layer_model() const {
  const Parameters& p = *parameters_;
  LayerModel model{.config = what_};
  const RouterNetwork& network = what_.router.network;
  const std::int64_t rows = what_.router.gate_rows();
  model.gate =
      parameter(p.value(tensors_.gate), rows * network.features(config_.hidden), Backend::kCpu);
  model.router_network =
      parameter(p.value(tensors_.network), network.size(config_.hidden), Backend::kCpu);
  model.noise_gate = parameter(p.value(tensors_.noise_gate), rows * config_.hidden, Backend::kCpu);
  model.selection_bias = parameter(p.buffer(tensors_.bias), config_.experts, Backend::kCpu);
  model.experts = dense_ ? make_memory_source(what_.experts, DType::kF32, p.value(tensors_.w13),
                                              p.value(tensors_.w2))
                         : make_share_source(what_.experts, experts_of(config_, options_),
                                             p.value(tensors_.w13), p.value(tensors_.w2));
  if (what_.shared.num_experts > 0) {
    model.shared = make_memory_source(what_.shared, DType::kF32, p.value(tensors_.shared_w13),
                                      p.value(tensors_.shared_w2));
  }
  model.shared_gate = parameter(p.value(tensors_.shared_gate), config_.hidden, Backend::kCpu);
  return model;
}

LayerOptions MoeBlock::layer_options(bool training) const {
  LayerOptions options;
  options.compute = options_.compute;
  options.num_threads = options_.num_threads;
  options.max_tokens = options_.max_tokens;
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

void MoeBlock::weights_changed() {
  if (soft_) return soft_->weights_changed();
  training_.stale = true;
  inference_.stale = true;
  if (adapters_) adapters_->weights_changed();
}

MoeLayer& MoeBlock::layer_for(bool training) {
  const bool both = dense_ || !config_.capacity_factor;
  Runner& runner = training || both ? training_ : inference_;
  if (!runner.layer) {
    runner.layer.emplace(layer_model(), layer_options(false), ranks_);
  } else if (runner.stale) {
    runner.layer->reload_experts();
  }
  runner.stale = false;
  return *runner.layer;
}

void MoeBlock::forward(const BlockCall& call, Matrix<float> out) {
  if (soft_) return soft_->forward(call.x, call.positions, call.before, call.training, out);
  const auto [num_tokens, hidden] = call.x.shape;
  ForwardArgs args{.tokens = raw(call.x.data, num_tokens, hidden),
                   .out = raw(out.data, num_tokens, hidden)};
  if (dense_) {
    one_expert_.resize(static_cast<std::size_t>(num_tokens), 0);
    one_weight_.resize(static_cast<std::size_t>(num_tokens), 1.0F);
    args.expert = {one_expert_.data(), {num_tokens, 1}};
    args.weight = {one_weight_.data(), {num_tokens, 1}};
  } else {
    args.request.token_ids = {call.ids, {num_tokens}};
    args.request.seed = options_.seed;
    args.request.step = call.step;
    args.request.layer = layer_;
    args.request.first_token = call.first_token;
    args.request.training = call.training;
    if (call.training || call.hook != nullptr || (adapters_ && adapters_->follow_the_layer())) {
      args.request.record = &record_;
    }
  }
  if (call.training) {
    args.saved = &saved_;
    args.tokens_stay = true;
  }
  const RouteRequest request = args.request;
  MoeLayer& layer = layer_for(call.training);
  layer.forward(args);
  if (call.hook != nullptr && !dense_) {
    if (ask(*call.hook, args)) layer.forward(args);
    record_.expert = routing_.expert;  // whether they are changed or not: what adapters follow
    record_.weight = routing_.weight;
  }
  if (!adapters_) return;
  args.request = request;
  adapters_->forward(args);
}

bool MoeBlock::ask(const RoutingHook& hook, ForwardArgs& args) {
  const std::int64_t gates = what_.router.num_gates(), num_tokens = args.tokens.rows;
  const std::int64_t top_k = gates * what_.router.top_k();
  routing_ = {.layer = layer_, .num_experts = what_.router.num_experts, .top_k = top_k};
  routing_.expert = side_by_side(std::move(record_.expert), gates, num_tokens);
  routing_.weight = side_by_side(std::move(record_.weight), gates, num_tokens);
  if (!hook(routing_)) return false;
  if (gates > 1) {
    fail(ErrorCode::kUnsupported,
         "the hook has changed the routing of layer {}: the router chain decides in each of {} "
         "iterations by what the one before has made",
         layer_, gates);
  }
  const auto size = static_cast<std::size_t>(num_tokens * top_k);
  require(routing_.expert.size() == size && routing_.weight.size() == size,
          "the hook of layer {} has left {} experts and {} weights, want [{}, {}]", layer_,
          routing_.expert.size(), routing_.weight.size(), num_tokens, top_k);
  args.request = {};
  args.expert = {routing_.expert.data(), {num_tokens, top_k}};
  args.weight = {routing_.weight.data(), {num_tokens, top_k}};
  return true;
}

void MoeBlock::backward(Matrix<const float> dout, Matrix<float> dx, double scale, bool accumulate) {
  if (soft_) return soft_->backward(dout, dx, accumulate);
  const auto [num_tokens, hidden] = dout.shape;
  const Parameters& p = *parameters_;
  const std::int64_t gate_rows = what_.router.gate_rows();
  BackwardArgs args{
      .saved = &saved_,
      .dout = raw(dout.data, num_tokens, hidden),
      // The mean over ranks, of which each makes its own part.
      .loss_scale = ranks_ == nullptr ? scale : scale / ranks_->size(),
      .dtokens = raw(dx.data, num_tokens, hidden),
      .dgate = raw(p.gradient(tensors_.gate), gate_rows, what_.router.network.features(hidden)),
      .dnoise_gate = raw(p.gradient(tensors_.noise_gate), gate_rows, hidden),
      .experts = expert_gradients(p, tensors_.w13, tensors_.w2),
      .shared = expert_gradients(p, tensors_.shared_w13, tensors_.shared_w2),
      .accumulate = accumulate};
  if (float* const gradient = p.gradient(tensors_.shared_gate)) {
    args.dshared_gate = {gradient, {hidden}};
  }
  if (float* const gradient = p.gradient(tensors_.network)) {
    args.drouter_network = {gradient, {what_.router.network.size(hidden)}};
  }
  if (adapters_) {
    adapters_->backward(args, saved_.logits());
  } else if (tensors_.l1 >= 0) {
    for (float& gradient : dlogits_) gradient *= static_cast<float>(scale);
    args.dlogits = {dlogits_.data(), {num_tokens, gate_rows}};
  }
  layer_for(true).backward(args);
  if (adapters_) adapters_->add_to_dtokens(args);
}

double MoeBlock::take_stats(RoutingStats& stats) {
  if (soft_) {
    const std::vector<std::int64_t> rows(static_cast<std::size_t>(config_.experts),
                                         soft_->rows_of_expert());
    stats = {.layer = layer_, .tokens = soft_->num_tokens(), .counts = rows, .counts_kept = rows};
    return 0;
  }
  double value = 0;
  LossValues losses{};
  const Vector<const double> values = saved_.losses();
  if (values.data != nullptr) {
    losses = loss_values(values.data);
    value = losses.total;
  }
  if (tensors_.l1 >= 0 && !adapters_) {
    const Matrix<const float> logits = saved_.logits();
    const double coefficient = *parameters_->buffer(tensors_.l1);
    dlogits_.assign(static_cast<std::size_t>(logits.size()), 0.0F);
    const ReluL1 l1 = relu_l1({.logits = logits,
                               .top_k = config_.top_k,
                               .scale = coefficient,
                               .dlogits = {dlogits_.data(), logits.shape}});
    active_ = l1.active;
    value += coefficient * l1.value;
  }
  stats = {.layer = layer_,
           .tokens = std::ssize(record_.expert) /
                     std::max(1, what_.router.num_gates() * what_.router.top_k()),
           .counts = record_.counts,
           .counts_kept = record_.counts_kept,
           .losses = losses};
  return value;
}

void MoeBlock::update_router(const RoutingStats& stats) {
  if (dense_ || adapters_ || soft_) return;
  if (tensors_.l1 >= 0) {
    float& coefficient = *parameters_->buffer(tensors_.l1);
    coefficient = static_cast<float>(next_l1_coefficient(coefficient, active_, config_.top_k));
  }
  if (tensors_.bias < 0) return;
  const Vector<float> bias{parameters_->buffer(tensors_.bias), {config_.experts}};
  if (std::holds_alternative<ExpertThresholdRouter>(what_.router.kind)) {
    if (saved_.logits().data == nullptr) return;
    update_thresholds({.logits = saved_.logits(), .top_k = config_.top_k, .bias = bias});
    return;
  }
  update_selection_bias({.counts = {stats.counts.data(), {std::ssize(stats.counts)}},
                         .rate = config_.bias_rate,
                         .bias = bias});
}

}  // namespace switchyard::models
