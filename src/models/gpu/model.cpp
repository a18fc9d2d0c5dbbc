// The model on a GPU as a list of calls, each layer's forward and backward side by side; the same
// as models/model.cpp. The residual stream and its gradient are f32, all else of the compute type;
// what attention and the experts add to the stream is added by the norm that reads it next.
#include "models/gpu/model.hpp"

#include <algorithm>

namespace switchyard::models::gpu {

std::int64_t GpuModel::piece_of_logits() const {
  constexpr std::int64_t kBytes = std::int64_t{512} << 20;
  constexpr std::int64_t kRows = 128;  // so that pieces begin at multiples of 256 bytes
  return std::max<std::int64_t>(1, kBytes / (4 * config_.vocabulary) / kRows) * kRows;
}

void GpuModel::reserve(const Call& call) {
  const std::int64_t tokens = std::max({call.size(), options_.max_tokens, reserved_tokens_});
  if (tokens <= reserved_tokens_ && (reserved_training_ || !call.training)) return;
  for (auto& of_kind : graphs_) {
    for (Captured& captured : of_kind) {
      captured.graph.reset();
      captured.warm = false;
    }
  }
  const std::int64_t c = bf16_ ? 2 : 4, hidden = config_.hidden, dim = config_.head_dim;
  const std::int64_t of_q = config_.heads * dim, qk = of_q + config_.kv_heads * dim;
  const std::int64_t qkv = qk + config_.kv_heads * dim;
  const bool training = call.training || reserved_training_;
  rooms_.resize(training ? static_cast<std::size_t>(config_.layers) + 1 : 1);
  for (LayerRooms& rooms : rooms_) {
    rooms.x.reserve(4 * tokens * hidden);
    if (training && &rooms == &rooms_.back()) break;
    rooms.norm1.reserve(c * tokens * hidden);
    rooms.scale1.reserve(4 * tokens);
    rooms.qkv.reserve(c * tokens * qkv);
    rooms.qk_scale.reserve(4 * tokens * (config_.heads + config_.kv_heads));
    rooms.turned.reserve(c * tokens * qk);
    rooms.mixed.reserve(c * tokens * of_q);
    rooms.lse.reserve(4 * tokens * config_.heads);
    rooms.middle.reserve(4 * tokens * hidden);
    rooms.norm2.reserve(c * tokens * hidden);
    rooms.scale2.reserve(4 * tokens);
  }
  block_.reserve(c * tokens * hidden);
  scale_.reserve(4 * tokens);
  inputs_.reserve(static_cast<std::int64_t>(sizeof(CallInputs)) + 8 * tokens);
  const auto aligned = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::int64_t logits = std::min(tokens, piece_of_logits()) * config_.vocabulary;
  dlogits_at_ = aligned(4 * logits);
  norm_at_ = aligned(training ? dlogits_at_ + c * logits : 4 * logits);
  attended_at_ = aligned(std::max(norm_at_ + c * tokens * hidden, training ? c * tokens * qkv : 0));
  scratch().inner_rows(attended_at_ + c * tokens * (training ? std::max(hidden, of_q) : hidden));
  (void)workspace();
  nll_.reserve(4 * tokens);
  reserved_tokens_ = tokens;
  reserved_training_ = training;
  if (!training) return;
  if (bf16_) dstream_typed_.reserve(2 * tokens * hidden);
  delta_.reserve(4 * tokens * config_.heads);
  parts_.reserve(4 * std::max(norm_parts(tokens, hidden), rope_parts(tokens, dim)));
}

void GpuModel::rehearse(const Call& call) {
  const std::int64_t hidden = config_.hidden, of_q = config_.heads * config_.head_dim;
  const LayerTensors& tensors = host_->layer(0);
  const std::int64_t qkv = config_.qkv_columns();
  const LayerRooms& rooms = rooms_.front();
  const auto all_of = [&](Dense x, Dense y, std::int64_t weight, Dense dx, std::int64_t count,
                          std::int64_t in, std::int64_t out, Dense forward_to) {
    products_.forward(x, parameters_.typed(weight), forward_to, count, in, out, stream_.get(),
                      workspace());
    if (!call.training) return;
    products_.backward_input(y, parameters_.typed(weight), dx, count, in, out, stream_.get(),
                             workspace());
    for (const bool accumulate : {false, true}) {
      products_.backward_weights(y, x, parameters_.dense_gradient(weight), count, in, out,
                                 accumulate, stream_.get(), workspace());
    }
  };
  all_of(typed(rooms.norm1), typed(dqkv()), tensors.qkv, typed(dnorm()), call.size(), hidden, qkv,
         typed(rooms.qkv));
  all_of(typed(rooms.mixed), dstream_typed(), tensors.o, typed(dmixed()), call.size(), of_q, hidden,
         typed(attended()));
  for (std::int64_t first = 0; first < call.size(); first += piece_of_logits()) {
    const std::int64_t count = std::min(piece_of_logits(), call.size() - first);
    all_of(typed(norm()), typed(dlogits()), host_->head(), typed(dnorm()), count, hidden,
           config_.vocabulary, {logits(), false});
  }
  stream_.wait();
}

void GpuModel::run(const Call& call) {
  const std::int64_t hidden = config_.hidden;
  embed({.ids = device_tokens(),
         .table = parameters_.value(host_->embedding()),
         .x = floats(rooms_[0].x),
         .tokens = call.size(),
         .vocabulary = config_.vocabulary,
         .hidden = hidden,
         .stream = stream_.get()});
  for (std::int32_t l = 0; l < config_.layers; ++l) {
    LayerRooms& rooms = rooms_of(call, l);
    attention_forward(call, l, rooms);
    block_forward(call, l, rooms);
  }
  LayerRooms& last = rooms_of(call, config_.layers);
  rms_norm({.x = floats(rooms_of(call, config_.layers - 1).middle),
            .delta = block_.data(),
            .sum = floats(last.x),
            .weight = parameters_.value(host_->norm()),
            .y = norm(),
            .scale = floats(scale_),
            .rows = call.size(),
            .size = hidden,
            .epsilon = config_.norm_epsilon,
            .bf16 = bf16_,
            .stream = stream_.get()});
}

RopeArgs GpuModel::rope_args(const Call& call, std::int32_t l, const LayerRooms& rooms) const {
  const LayerTensors& tensors = host_->layer(l);
  return {.qkv = rooms.qkv.data(),
          .q_weight = parameters_.value(tensors.q_norm),
          .k_weight = parameters_.value(tensors.k_norm),
          .cosine = floats(cosine_),
          .sine = floats(sine_),
          .turned = rooms.turned.data(),
          .scales = floats(rooms.qk_scale),
          .rows = call.size(),
          .positions = call.positions,
          .first = call.before,
          .heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = static_cast<std::int32_t>(config_.head_dim),
          .epsilon = config_.norm_epsilon,
          .bf16 = bf16_,
          .stream = stream_.get()};
}

AttentionArgs GpuModel::attention_args(const Call& call, const LayerRooms& rooms) const {
  const std::int64_t c = bf16_ ? 2 : 4, dim = config_.head_dim;
  const std::int64_t of_q = config_.heads * dim, qk = of_q + config_.kv_heads * dim;
  return {.q = {rooms.turned.data(), qk},
          .k = {rooms.turned.data() + c * of_q, qk},
          .v = {rooms.qkv.data() + c * qk, qk + config_.kv_heads * dim},
          .out = {rooms.mixed.data(), of_q},
          .lse = floats(rooms.lse),
          .batch = call.batch,
          .positions = call.positions,
          .heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = static_cast<std::int32_t>(dim),
          .bf16 = bf16_,
          .stream = stream_.get()};
}

void GpuModel::attention_forward(const Call& call, std::int32_t l, LayerRooms& rooms) {
  const LayerTensors& tensors = host_->layer(l);
  const std::int64_t hidden = config_.hidden, of_q = config_.heads * config_.head_dim;
  const std::int64_t qkv = config_.qkv_columns();
  const bool first = l == 0;
  rms_norm({.x = floats(first ? rooms.x : rooms_of(call, l - 1).middle),
            .delta = first ? nullptr : block_.data(),
            .sum = first ? nullptr : floats(rooms.x),
            .weight = parameters_.value(tensors.norm1),
            .y = rooms.norm1.data(),
            .scale = floats(rooms.scale1),
            .rows = call.size(),
            .size = hidden,
            .epsilon = config_.norm_epsilon,
            .bf16 = bf16_,
            .stream = stream_.get()});
  products_.forward(typed(rooms.norm1), parameters_.typed(tensors.qkv), typed(rooms.qkv),
                    call.size(), hidden, qkv, stream_.get(), workspace());
  rope(rope_args(call, l, rooms));
  if (call.cache == nullptr) {
    attention(attention_args(call, rooms));
  } else {
    attend_cached(call, l, rooms);
  }
  products_.forward(typed(rooms.mixed), parameters_.typed(tensors.o), typed(attended()),
                    call.size(), of_q, hidden, stream_.get(), workspace());
}

void GpuModel::attend_cached(const Call& call, std::int32_t l, LayerRooms& rooms) {
  const auto dim = static_cast<std::int32_t>(config_.head_dim);
  append({.turned = rooms.turned.data(),
          .qkv = rooms.qkv.data(),
          .cache = call.cache->layer(l),
          .rows = call.size(),
          .positions = call.positions,
          .first = call.before,
          .heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = dim,
          .bf16 = bf16_,
          .stream = stream_.get()});
  if (call.before == 0) return attention(attention_args(call, rooms));
  attend({.turned = rooms.turned.data(),
          .cache = call.cache->layer(l),
          .first = call.before,
          .rows = call.size(),
          .positions = call.positions,
          .heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = dim,
          .mixed = rooms.mixed.data(),
          .bf16 = bf16_,
          .stream = stream_.get()});
}

void GpuModel::attention_backward(const Call& call, std::int32_t l) {
  LayerRooms& rooms = rooms_of(call, l);
  const LayerTensors& tensors = host_->layer(l);
  const std::int64_t c = bf16_ ? 2 : 4, hidden = config_.hidden, dim = config_.head_dim;
  const std::int64_t of_q = config_.heads * dim, qk = of_q + config_.kv_heads * dim;
  const std::int64_t qkv = qk + config_.kv_heads * dim;
  cudaStream_t stream = stream_.get();
  products_.backward_input(dstream_typed(), parameters_.typed(tensors.o), typed(dmixed()),
                           call.size(), of_q, hidden, stream, workspace());
  products_.backward_weights(dstream_typed(), typed(rooms.mixed),
                             parameters_.dense_gradient(tensors.o), call.size(), of_q, hidden,
                             call.accumulate, stream, workspace());
  gpu::attention_backward({.forward = attention_args(call, rooms),
                           .dout = {dmixed(), of_q},
                           .dq = {dqkv(), qkv},
                           .dk = {dqkv() + c * of_q, qkv},
                           .dv = {dqkv() + c * qk, qkv},
                           .delta = floats(delta_)});
  rope_backward({.forward = rope_args(call, l, rooms),
                 .dqkv = dqkv(),
                 .dq_weight = parameters_.gradient(tensors.q_norm),
                 .dk_weight = parameters_.gradient(tensors.k_norm),
                 .accumulate = call.accumulate,
                 .parts = floats(parts_)});
  products_.backward_input(typed(dqkv()), parameters_.typed(tensors.qkv), typed(dnorm()),
                           call.size(), hidden, qkv, stream, workspace());
  products_.backward_weights(typed(dqkv()), typed(rooms.norm1),
                             parameters_.dense_gradient(tensors.qkv), call.size(), hidden, qkv,
                             call.accumulate, stream, workspace());
  norm_backward(call, rooms.x, rooms.scale1, tensors.norm1, false, l > 0);
}

void GpuModel::block_forward(const Call& call, std::int32_t l, LayerRooms& rooms) {
  rms_norm({.x = floats(rooms.x),
            .delta = attended(),
            .sum = floats(rooms.middle),
            .weight = parameters_.value(host_->layer(l).norm2),
            .y = rooms.norm2.data(),
            .scale = floats(rooms.scale2),
            .rows = call.size(),
            .size = config_.hidden,
            .epsilon = config_.norm_epsilon,
            .bf16 = bf16_,
            .stream = stream_.get()});
  const BlockRecord record = record_of(record_.data(), static_cast<std::size_t>(l));
  blocks_[static_cast<std::size_t>(l)].forward({.x = rows(rooms.norm2.data(), call.size()),
                                                .out = rows(block_.data(), call.size()),
                                                .ids = device_tokens(),
                                                .step = call.step,
                                                .first_token = call.first_token,
                                                .training = call.training,
                                                .stream = stream_.get()},
                                               &record);
}

void GpuModel::block_backward(const Call& call, std::int32_t l) {
  const LayerRooms& rooms = rooms_of(call, l);
  blocks_[static_cast<std::size_t>(l)].backward(
      rows(static_cast<std::byte*>(dstream_typed().data), call.size()), rows(dnorm(), call.size()),
      call.scale, call.accumulate, record_of(record_.data(), static_cast<std::size_t>(l)),
      stream_.get());
  norm_backward(call, rooms.middle, rooms.scale2, host_->layer(l).norm2, false, true);
}

/// Of dnorm; adds to the stream's gradient.
void GpuModel::norm_backward(const Call& call, const DeviceBuffer& x, const DeviceBuffer& scale,
                             std::int64_t weight, bool first, bool typed) {
  rms_norm_backward({.x = floats(x),
                     .weight = parameters_.value(weight),
                     .scale = floats(scale),
                     .dy = dnorm(),
                     .dx = dstream(),
                     .add = !first,
                     .dx_typed = typed && bf16_ ? dstream_typed_.data() : nullptr,
                     .dweight = parameters_.gradient(weight),
                     .accumulate = call.accumulate,
                     .parts = floats(parts_),
                     .rows = call.size(),
                     .size = config_.hidden,
                     .bf16 = bf16_,
                     .stream = stream_.get()});
}

void GpuModel::head_forward(const std::byte* normed, std::int64_t rows) {
  products_.forward({const_cast<std::byte*>(normed), bf16_}, parameters_.typed(host_->head()),
                    {logits(), false}, rows, config_.hidden, config_.vocabulary, stream_.get(),
                    workspace());
}

void GpuModel::losses(const Call& call) {
  const std::int64_t hidden = config_.hidden, c = bf16_ ? 2 : 4;
  const std::int64_t piece = piece_of_logits();
  for (std::int64_t first = 0; first < call.size(); first += piece) {
    const std::int64_t count = std::min(piece, call.size() - first);
    head_forward(norm() + c * first * hidden, count);
    cross_entropy({.logits = logits(),
                   .targets = device_targets(call) + first,
                   .rows = count,
                   .vocabulary = config_.vocabulary,
                   .nll = floats(nll_) + first,
                   .dlogits = call.training ? dlogits() : nullptr,
                   .scale = &device_inputs()->scale,
                   .bf16 = bf16_,
                   .stream = stream_.get()});
    if (!call.training) continue;
    products_.backward_input(typed(dlogits()), parameters_.typed(host_->head()),
                             {dnorm() + c * first * hidden, bf16_}, count, hidden,
                             config_.vocabulary, stream_.get(), workspace());
    products_.backward_weights(typed(dlogits()), {norm() + c * first * hidden, bf16_},
                               parameters_.dense_gradient(host_->head()), count, hidden,
                               config_.vocabulary, call.accumulate || first > 0, stream_.get(),
                               workspace());
  }
  sum_of(floats(nll_), call.size(), &device_record()->nll, stream_.get());
}

void GpuModel::backward(const Call& call) {
  norm_backward(call, rooms_of(call, config_.layers).x, scale_, host_->norm(), true, true);
  for (std::int32_t l = config_.layers - 1; l >= 0; --l) {
    block_backward(call, l);
    attention_backward(call, l);
  }
  embed_backward({.ids = device_tokens(),
                  .dx = dstream(),
                  .dtable = parameters_.gradient(host_->embedding()),
                  .tokens = call.size(),
                  .vocabulary = config_.vocabulary,
                  .hidden = config_.hidden,
                  .accumulate = call.accumulate || config_.tied,
                  .stream = stream_.get()});
}

}  // namespace switchyard::models::gpu
