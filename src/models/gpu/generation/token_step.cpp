// A token step: one kernel or the stages of a batch where it can be, else a list of calls. Few
// rows: products with the norm before them and the sum behind them in one kernel each, attention
// split over positions. Many: cuBLASLt's products, as a forward.
#include <cstring>

#include "core/check.hpp"
#include "models/gpu/generation/cache.hpp"

namespace switchyard::models::gpu {

void GpuCache::start(const std::int32_t* tokens, std::int64_t position, const StepTools& tools) {
  require(position < capacity_, "a step at position {}: the cache has room for {}", position,
          capacity_);
  require(under_way_ < (tokens == nullptr ? kRing : 1), "{} steps of a cache are under way",
          under_way_);
  if (tokens != nullptr) {
    const std::size_t bytes = kIdsAt + 4 * static_cast<std::size_t>(batch_);
    const CachePlace place{.next = static_cast<std::int32_t>(position)};
    std::memcpy(sent_.data(), &place, sizeof(place));
    std::memcpy(sent_.data() + kIdsAt, tokens, bytes - kIdsAt);
    SWITCHYARD_CUDA(
        cudaMemcpyAsync(input_.data(), sent_.data(), bytes, cudaMemcpyHostToDevice, tools.stream));
  } else {
    require(position == next_, "a step at position {} without tokens, the cache is at {}", position,
            next_);
  }
  bool may = warm_;  // the first step makes memory and asks for what a graph cannot
  for (const DeviceBlock& block : blocks_) may = may && block.may_be_captured(false);
  if (one_kernel_) {
    one_kernel_->cosine = tools.cosine;
    one_kernel_->sine = tools.sine;
    one_kernel_->stream = tools.stream;
    persistent_step(*one_kernel_);
  } else if (may) {
    if (!graph_) graph_.emplace(tools.stream, [&] { enqueue(tools); });
    graph_->launch(tools.stream);
  } else {
    enqueue(tools);
    warm_ = true;
  }
  done_[static_cast<std::size_t>(position % kRing)].record(tools.stream);
  next_ = position + 1;
  ++under_way_;
}

std::span<const std::int32_t> GpuCache::finish() {
  require(under_way_ > 0, "no step of the cache is under way");
  const std::int64_t slot = (next_ - under_way_) % kRing;
  done_[static_cast<std::size_t>(slot)].wait();
  --under_way_;
  const auto* const told = reinterpret_cast<const std::int32_t*>(told_.data());
  return {told + slot * batch_, static_cast<std::size_t>(batch_)};
}

void GpuCache::check() {
  for (DeviceBlock& block : blocks_) block.check();
}

void GpuCache::enqueue(const StepTools& tools) {
  begin_step({.ids = ids(),
              .table = parameters_->value(host_->embedding()),
              .x = floats(x_),
              .place = place(),
              .rows = batch_,
              .hidden = config_.hidden,
              .stream = tools.stream});
  for (std::int32_t l = 0; l < config_.layers; ++l) {
    if (is_batch_) {
      batch_layer(l, tools);
    } else {
      attention_step(l, tools);
      block_step(l, tools);
    }
  }
  if (is_batch_) {
    batch_head(tools);
  } else {
    head_step(tools);
  }
  likeliest({.logits = floats(logits_),
             .rows = batch_,
             .vocabulary = config_.vocabulary,
             .ids = ids(),
             .told = reinterpret_cast<std::int32_t*>(told_.data()),
             .place = place(),
             .ring = kRing,
             .stream = tools.stream});
}

/// Many rows: norm_ of x + delta, which is written to `sum`.
void GpuCache::norm(const float* x, const std::byte* delta, float* sum, std::int64_t weight,
                    const StepTools& tools) {
  rms_norm({.x = x,
            .delta = delta,
            .sum = sum,
            .weight = parameters_->value(weight),
            .y = norm_.data(),
            .scale = floats(scale_),
            .rows = batch_,
            .size = config_.hidden,
            .epsilon = config_.norm_epsilon,
            .bf16 = bf16_,
            .stream = tools.stream});
}

void GpuCache::attention_step(std::int32_t l, const StepTools& tools) {
  const LayerTensors& tensors = host_->layer(l);
  const std::int64_t hidden = config_.hidden, of_q = config_.heads * config_.head_dim;
  const std::int64_t qkv = config_.qkv_columns();
  const bool first = l == 0;
  const float* const x = first ? floats(x_) : floats(middle_);
  const std::byte* const delta = first ? nullptr : block_.data();
  float* const sum = first ? nullptr : floats(x_);
  if (few_) {
    row_product({.x = x,
                 .delta = delta,
                 .sum = sum,
                 .norm_weight = parameters_->value(tensors.norm1),
                 .epsilon = config_.norm_epsilon,
                 .w = parameters_->typed(tensors.qkv).data,
                 .y = qkv_.data(),
                 .rows = batch_,
                 .in = hidden,
                 .out = qkv,
                 .bf16 = bf16_,
                 .stream = tools.stream});
  } else {
    norm(x, delta, sum, tensors.norm1, tools);
    tools.products->forward(typed(norm_), parameters_->typed(tensors.qkv), typed(qkv_), batch_,
                            hidden, qkv, tools.stream, workspace_.data());
  }
  attend_step(l, tools);
  if (few_) {
    row_product({.mixed = mixed_.data(),
                 .parts = floats(parts_),
                 .stats = floats(stats_),
                 .splits = splits_,
                 .heads = config_.heads,
                 .w = parameters_->typed(tensors.o).data,
                 .add = floats(x_),
                 .y = middle_.data(),
                 .y_is_f32 = true,
                 .rows = batch_,
                 .in = of_q,
                 .out = hidden,
                 .bf16 = bf16_,
                 .stream = tools.stream});
  } else {
    tools.products->forward(typed(mixed_), parameters_->typed(tensors.o), typed(attended_), batch_,
                            of_q, hidden, tools.stream, workspace_.data());
  }
}

void GpuCache::attend_step(std::int32_t l, const StepTools& tools) {
  const LayerTensors& tensors = host_->layer(l);
  attend({.qkv = qkv_.data(),
          .q_weight = parameters_->value(tensors.q_norm),
          .k_weight = parameters_->value(tensors.k_norm),
          .cosine = tools.cosine,
          .sine = tools.sine,
          .epsilon = config_.norm_epsilon,
          .cache = layer(l),
          .place = place(),
          .cache_is_older = is_batch_ && l > 0,  // l - 1 has waited for what wrote them
          .rows = batch_,
          .heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = static_cast<std::int32_t>(config_.head_dim),
          .splits = splits_,
          .mixed = mixed_.data(),
          .parts = floats(parts_),
          .stats = floats(stats_),
          .bf16 = bf16_,
          .stream = tools.stream});
}

/// Of middle_, or where rows are many of x_ and what attention has left, which then are middle_.
void GpuCache::norm_route_step(std::int32_t l, const TopKRouter& router, const StepTools& tools) {
  const LayerTensors& tensors = host_->layer(l);
  const bool adds = !few_ && !is_batch_;
  norm_route({.x = adds ? floats(x_) : floats(middle_),
              .delta = adds ? attended_.data() : nullptr,
              .sum = floats(middle_),
              .weight = parameters_->value(tensors.norm2),
              .y = norm_.data(),
              .gate = parameters_->value(tensors.gate),
              .bias = parameters_->buffer(tensors.bias),
              .expert = reinterpret_cast<std::int32_t*>(expert_.data()),
              .share = floats(share_),
              .rows = batch_,
              .size = config_.hidden,
              .experts = config_.experts,
              .top_k = router.top_k,
              .renormalize = router.renormalize,
              .scale = router.scale,
              .epsilon = config_.norm_epsilon,
              .bf16 = bf16_,
              .lets_next_begin = is_batch_,
              .stream = tools.stream});
}

void GpuCache::block_step(std::int32_t l, const StepTools& tools) {
  const LayerTensors& tensors = host_->layer(l);
  const std::int64_t weight = tensors.norm2;
  DeviceBlock& block = blocks_[static_cast<std::size_t>(l)];
  const bool routes = routes_ && !block.is_dense();
  if (routes) {
    norm_route_step(l, block.router().as_top_k(), tools);
  } else if (few_) {
    norm_rows({.x = floats(middle_),
               .weight = parameters_->value(weight),
               .y = norm_.data(),
               .rows = batch_,
               .size = config_.hidden,
               .epsilon = config_.norm_epsilon,
               .bf16 = bf16_,
               .stream = tools.stream});
  } else {
    norm(floats(x_), attended_.data(), floats(middle_), weight, tools);
  }
  const DType dtype = bf16_ ? DType::kBF16 : DType::kF32;
  block.forward({.x = {norm_.data(), dtype, batch_, config_.hidden},
                 .out = {block_.data(), dtype, batch_, config_.hidden},
                 .ids = ids(),
                 .expert = routes ? reinterpret_cast<const std::int32_t*>(expert_.data()) : nullptr,
                 .share = routes ? floats(share_) : nullptr,
                 .stream = tools.stream},
                nullptr);
}

void GpuCache::head_step(const StepTools& tools) {
  if (few_) {
    row_product({.x = floats(middle_),
                 .delta = block_.data(),
                 .norm_weight = parameters_->value(host_->norm()),
                 .epsilon = config_.norm_epsilon,
                 .w = parameters_->typed(host_->head()).data,
                 .y = logits_.data(),
                 .y_is_f32 = true,
                 .rows = batch_,
                 .in = config_.hidden,
                 .out = config_.vocabulary,
                 .bf16 = bf16_,
                 .stream = tools.stream});
  } else {
    norm(floats(middle_), block_.data(), floats(x_), host_->norm(), tools);
    tools.products->forward(typed(norm_), parameters_->typed(host_->head()),
                            {logits_.data(), false}, batch_, config_.hidden, config_.vocabulary,
                            tools.stream, workspace_.data());
  }
}

}  // namespace switchyard::models::gpu
