// Token steps that consist of the stages of a batch: which do, and in which order.
#include <algorithm>

#include "models/gpu/generation/batch/stages.hpp"
#include "models/gpu/generation/cache.hpp"
#include "models/layer_arguments.hpp"

namespace switchyard::models::gpu {

bool GpuCache::reserve_for_batch(const ModelOptions& options) {
  const std::int64_t hidden = config_.hidden;
  const bool routes = config_.first_dense < config_.layers;
  const bool dense = config_.first_dense > 0;
  if (!bf16_ || batch_ <= kFewRows || batch_ > kBatchRows || !has_plain_experts(options) ||
      hidden % 8 != 0 || hidden > kMostBatchHidden || config_.heads * config_.head_dim % 8 != 0 ||
      (routes && config_.experts * hidden > kMostOfGate) ||
      (routes && !batch_experts_fit(hidden, config_.inner)) ||
      (dense && !batch_experts_fit(hidden, config_.dense_inner))) {
    return false;
  }
  const std::int32_t top_k = routes ? layer_config(config_).router.top_k() : 1;
  if (routes) reserve_for_choice(top_k);
  norm_.reserve(2 * batch_ * hidden);
  inner_.reserve(2 * batch_ *
                 std::max(routes ? top_k * config_.inner : 0, dense ? config_.dense_inner : 0));
  expert_parts_.reserve(4 * batch_ * std::max(top_k * splits_of_experts(), 1) * hidden);
  is_batch_ = true;
  return true;
}

/// Of a layer that routes.
std::int32_t GpuCache::splits_of_experts() const {
  return batch_expert_splits(config_.experts, config_.hidden, config_.inner);
}

void GpuCache::batch_layer(std::int32_t l, const StepTools& tools) {
  const LayerTensors& tensors = host_->layer(l);
  const std::int64_t hidden = config_.hidden, of_q = config_.heads * config_.head_dim;
  batch_norm(l, tools);
  batch_product({.x = norm_.data(),
                 .w = parameters_->typed(tensors.qkv).data,
                 .y = qkv_.data(),
                 .rows = batch_,
                 .in = hidden,
                 .out = config_.qkv_columns(),
                 .stream = tools.stream});
  attend_step(l, tools);
  batch_product({.x = mixed_.data(),
                 .w = parameters_->typed(tensors.o).data,
                 .add = floats(x_),
                 .y = middle_.data(),
                 .y_is_f32 = true,
                 .rows = batch_,
                 .in = of_q,
                 .out = hidden,
                 .stream = tools.stream});
  batch_block(l, tools);
}

/// x_ and its norm in front of layer l; behind the last one, of the head.
void GpuCache::batch_norm(std::int32_t l, const StepTools& tools) {
  const bool first = l == 0, behind = l == config_.layers;
  const bool chosen = !first && !config_.is_dense(l - 1);
  sum_norm({.x = first ? floats(x_) : floats(middle_),
            .parts = first ? nullptr : floats(expert_parts_),
            .share = chosen ? floats(share_) : nullptr,
            .top_k = chosen ? layer_config(config_).router.top_k() : 1,
            .splits = chosen ? splits_of_experts() : 1,
            .sum = first ? nullptr : floats(x_),
            .weight = parameters_->value(behind ? host_->norm() : host_->layer(l).norm1),
            .y = norm_.data(),
            .rows = batch_,
            .hidden = config_.hidden,
            .epsilon = config_.norm_epsilon,
            .stream = tools.stream});
}

BatchExpertsArgs GpuCache::experts_args(std::int32_t l, const StepTools& tools) const {
  const LayerTensors& tensors = host_->layer(l);
  BatchExpertsArgs args{.w13 = parameters_->typed(tensors.w13).data,
                        .w2 = parameters_->typed(tensors.w2).data,
                        .x = norm_.data(),
                        .inner = inner_.data(),
                        .parts = floats(expert_parts_),
                        .rows = batch_,
                        .h = config_.hidden,
                        .i = config_.dense_inner,
                        .stream = tools.stream};
  if (config_.is_dense(l)) return args;
  args.expert = reinterpret_cast<const std::int32_t*>(expert_.data());
  args.num_experts = config_.experts;
  args.top_k = layer_config(config_).router.top_k();
  args.i = config_.inner;
  return args;
}

void GpuCache::batch_block(std::int32_t l, const StepTools& tools) {
  if (config_.is_dense(l)) {
    sum_norm({.x = floats(middle_),
              .weight = parameters_->value(host_->layer(l).norm2),
              .y = norm_.data(),
              .rows = batch_,
              .hidden = config_.hidden,
              .epsilon = config_.norm_epsilon,
              .stream = tools.stream});
  } else {
    norm_route_step(l, layer_config(config_).router.as_top_k(), tools);
  }
  batch_experts(experts_args(l, tools));
}

void GpuCache::batch_head(const StepTools& tools) {
  batch_norm(config_.layers, tools);
  batch_product({.x = norm_.data(),
                 .w = parameters_->typed(host_->head()).data,
                 .y = logits_.data(),
                 .y_is_f32 = true,
                 .rows = batch_,
                 .in = config_.hidden,
                 .out = config_.vocabulary,
                 .stream = tools.stream});
}

}  // namespace switchyard::models::gpu
