// Token steps that are one kernel: which are, and what it is given.
#include <algorithm>
#include <vector>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "models/gpu/generation/cache.hpp"
#include "models/layer_arguments.hpp"
#include "models/over_ranks.hpp"

namespace switchyard::models::gpu {

bool GpuCache::has_plain_experts(const ModelOptions& options) const {
  const bool routes = config_.first_dense < config_.layers;
  const std::int64_t numbers = bf16_ ? 8 : 4;
  const bool of_experts = config_.shared_inner == 0 && config_.inner % numbers == 0 &&
                          chooses_by_softmax(layer_config(config_).router);
  const bool of_dense = config_.first_dense == 0 || config_.dense_inner % numbers == 0;
  return ranks_of(options) == nullptr && (!routes || of_experts) && of_dense;
}

PersistentLayer GpuCache::persistent_layer(std::int32_t l) const {
  const LayerTensors& tensors = host_->layer(l);
  const CacheLayer cache = layer(l);
  const bool dense = config_.is_dense(l);
  return {.norm1 = parameters_->value(tensors.norm1),
          .q_norm = parameters_->value(tensors.q_norm),
          .k_norm = parameters_->value(tensors.k_norm),
          .norm2 = parameters_->value(tensors.norm2),
          .qkv = parameters_->typed(tensors.qkv).data,
          .o = parameters_->typed(tensors.o).data,
          .gate = dense ? nullptr : parameters_->value(tensors.gate),
          .bias = dense ? nullptr : parameters_->buffer(tensors.bias),
          .w13 = parameters_->typed(tensors.w13).data,
          .w2 = parameters_->typed(tensors.w2).data,
          .keys = cache.keys,
          .values = cache.values,
          .inner = static_cast<std::int32_t>(dense ? config_.dense_inner : config_.inner)};
}

bool GpuCache::reserve_for_one_kernel(const ModelOptions& options) {
  if (!few_ || !has_plain_experts(options)) return false;
  const auto size = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  const bool routes = config_.first_dense < config_.layers;
  const std::int64_t of_dense = config_.first_dense > 0 ? config_.dense_inner : 0;
  PersistentStepArgs args;
  args.num_layers = config_.layers;
  args.vocabulary = size(config_.vocabulary);
  args.hidden = size(config_.hidden);
  args.heads = config_.heads;
  args.kv_heads = config_.kv_heads;
  args.head_dim = size(config_.head_dim);
  args.most_inner = size(std::max(routes ? config_.inner : 0, of_dense));
  args.epsilon = config_.norm_epsilon;
  if (routes) {
    const RouterConfig router = layer_config(config_).router;
    const TopKRouter& top_k = router.as_top_k();
    args.experts = router.num_experts;
    args.top_k = top_k.top_k;
    args.renormalize = top_k.renormalize;
    args.scale = top_k.scale;
  }
  args.capacity = capacity_;
  args.cache_row = cache_row(config_.head_dim, bf16_);
  args.splits = persistent_splits(batch_, config_.heads, config_.kv_heads, capacity_);
  args.rows = size(batch_);
  args.bf16 = bf16_;
  if (!persistent_step_fits(args)) return false;

  std::vector<PersistentLayer> layers;
  layers.reserve(static_cast<std::size_t>(config_.layers));
  for (std::int32_t l = 0; l < config_.layers; ++l) layers.push_back(persistent_layer(l));
  const auto of_layers = static_cast<std::int64_t>(sizeof(PersistentLayer) * layers.size());
  copy_to_device(layers_.reserve(of_layers), layers.data(), static_cast<std::size_t>(of_layers));
  reserve_splits(args.splits);
  const std::int64_t top_k = std::max(args.top_k, 1), c = bf16_ ? 2 : 4;
  inner_.reserve(c * batch_ * top_k * args.most_inner);
  router_logits_.reserve(4 * batch_ * std::max(args.experts, 1));
  best_.reserve(static_cast<std::int64_t>(sizeof(Best)) * batch_ * num_multiprocessors());
  barrier_.reserve(4 * kBarrierWords);  // zeros
  args.layers = reinterpret_cast<const PersistentLayer*>(layers_.data());
  args.table = parameters_->value(host_->embedding());
  args.norm = parameters_->value(host_->norm());
  args.head = parameters_->typed(host_->head()).data;
  args.ids = ids();
  args.place = place();
  args.told = reinterpret_cast<std::int32_t*>(told_.data());
  args.ring = kRing;
  args.x = floats(x_);
  args.middle = floats(middle_);
  args.qkv = qkv_.data();
  args.mixed = mixed_.data();
  args.parts = floats(parts_);
  args.stats = floats(stats_);
  args.router_logits = floats(router_logits_);
  args.inner = inner_.data();
  args.logits = floats(logits_);
  args.best = reinterpret_cast<Best*>(best_.data());
  args.barrier = reinterpret_cast<std::uint32_t*>(barrier_.data());
  one_kernel_ = args;
  return true;
}

}  // namespace switchyard::models::gpu
