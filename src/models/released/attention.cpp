#include "models/released/attention.hpp"

#include <algorithm>

#include "models/cpu/attention.hpp"
#include "models/cpu/rms_norm.hpp"

namespace switchyard::models {
namespace {

// Norms of the small vectors have an epsilon of their own, whatever the configuration says.
constexpr float kLatentEpsilon = 1e-6F;

void norm_row(const std::vector<float>& weight, float epsilon, float* x) {
  const auto size = std::ssize(weight);
  const float scale = norm_scale(x, size, epsilon);
  for (std::int64_t i = 0; i < size; ++i) x[i] = x[i] * scale * weight[static_cast<std::size_t>(i)];
}

/// Calls body(row) for each row, some of them a task.
template <class Body>
void for_rows(std::int64_t rows, ThreadPool* pool, const Body& body) {
  constexpr std::int64_t kRows = 16;
  parallel_for(pool, (rows + kRows - 1) / kRows, [&](std::int64_t task, int) {
    for (std::int64_t row = task * kRows; row < std::min(rows, (task + 1) * kRows); ++row) {
      body(row);
    }
  });
}

}  // namespace

ReleasedAttention::ReleasedAttention(const ReleasedConfig& config, std::int32_t layer,
                                     const std::string& prefix, DenseTensors& tensors)
    : config_(&config),
      window_(config.windows[static_cast<std::size_t>(layer)]),
      out_(tensors.projection({{prefix + "o_proj", config.hidden()}},
                              config.heads * config.value_dim, config.out_bias)) {
  const std::int64_t hidden = config.hidden(), of_q = config.heads * config.query_dim;
  const std::int64_t of_k = config.kv_heads * config.query_dim;
  const LatentConfig& latent = config.latent;
  if (latent.rank == 0) {
    in_.push_back(tensors.projection(
        {{prefix + "q_proj", of_q}, {prefix + "k_proj", of_k}, {prefix + "v_proj", of_k}}, hidden,
        config.bias));
    const bool whole = config.qk_norm == QkNorm::kWhole;
    if (config.qk_norm != QkNorm::kNone) {
      q_norm_ = tensors.vector(prefix + "q_norm.weight", whole ? of_q : config.query_dim);
      k_norm_ = tensors.vector(prefix + "k_norm.weight", whole ? of_k : config.query_dim);
    }
    if (config.sinks) sinks_ = tensors.vector(prefix + "sinks", config.heads);
    return;
  }
  if (latent.query_rank > 0) {
    in_.push_back(
        tensors.projection({{prefix + "q_a_proj", latent.query_rank}}, hidden, config.bias));
    q_norm_ = tensors.vector(prefix + "q_a_layernorm.weight", latent.query_rank);
    query_ = tensors.projection({{prefix + "q_b_proj", of_q}}, latent.query_rank, false);
  } else {
    in_.push_back(tensors.projection({{prefix + "q_proj", of_q}}, hidden, false));
  }
  in_.push_back(tensors.projection({{prefix + "kv_a_proj_with_mqa", latent.rank + latent.rope_dim}},
                                   hidden, config.bias));
  k_norm_ = tensors.vector(prefix + "kv_a_layernorm.weight", latent.rank);
  key_value_ = tensors.projection(
      {{prefix + "kv_b_proj", config.heads * (latent.plain_dim + config.value_dim)}}, latent.rank,
      false);
}

void ReleasedAttention::make_rows(const ReleasedAttentionArgs& args, ThreadPool* pool) const {
  const ReleasedConfig& config = *config_;
  const std::int64_t rows = args.batch * args.positions, dim = config.query_dim;
  const std::int64_t of_q = config.heads * dim, of_k = config.kv_heads * dim;
  const Projection& in = in_.front();
  float* const projected = args.rooms->projected.reserve(rows * in.out());
  in.forward(args.x, rows, projected, pool);
  float* const q = args.rooms->q.data();
  float* const k = args.rooms->k.data();
  float* const v = args.rooms->v.data();
  for_rows(rows, pool, [&](std::int64_t row) {
    float* const x = projected + row * in.out();
    const auto norm = [&](float* of, std::int64_t heads, const std::vector<float>& weight) {
      if (config.qk_norm == QkNorm::kWhole) norm_row(weight, config.norm_epsilon, of);
      for (std::int64_t n = 0; config.qk_norm == QkNorm::kHead && n < heads; ++n) {
        norm_row(weight, config.norm_epsilon, of + n * dim);
      }
    };
    norm(x, config.heads, q_norm_);
    norm(x + of_q, config.kv_heads, k_norm_);
    for (std::int64_t i = 0; config.clip > 0 && i < in.out(); ++i) {
      x[i] = std::clamp(x[i], -config.clip, config.clip);
    }
    for (std::int64_t n = 0; n < config.heads + config.kv_heads; ++n) {
      turn(config.rope, *args.angles, row % args.positions, x + n * dim);
    }
    std::copy_n(x, of_q, q + row * of_q);
    std::copy_n(x + of_q, of_k, k + row * of_k);
    std::copy_n(x + of_q + of_k, of_k, v + row * of_k);
  });
}

void ReleasedAttention::make_latent_rows(const ReleasedAttentionArgs& args,
                                         ThreadPool* pool) const {
  const ReleasedConfig& config = *config_;
  const LatentConfig& latent = config.latent;
  const std::int64_t rows = args.batch * args.positions, heads = config.heads;
  const std::int64_t dim = config.head_dim(), query_dim = config.query_dim;
  const std::int64_t small_size = in_.back().out(), pair = latent.plain_dim + config.value_dim;
  AttentionRooms& rooms = *args.rooms;
  float* const small = rooms.small.reserve(rows * std::max(small_size, in_.front().out()));
  float* const queries = rooms.projected.reserve(rows * heads * query_dim);
  in_.front().forward(args.x, rows, query_ ? small : queries, pool);
  if (query_) {
    for_rows(rows, pool, [&](std::int64_t row) {
      norm_row(q_norm_, kLatentEpsilon, small + row * latent.query_rank);
    });
    query_->forward(small, rows, queries, pool);
  }
  in_.back().forward(args.x, rows, small, pool);
  // The part without positions moves together: it is what keys and values are made of.
  float* const expanded = rooms.expanded.reserve(rows * (heads * pair + latent.rank));
  float* const packed = expanded + rows * heads * pair;
  for_rows(rows, pool, [&](std::int64_t row) {
    std::copy_n(small + row * small_size, latent.rank, packed + row * latent.rank);
    norm_row(k_norm_, kLatentEpsilon, packed + row * latent.rank);
    turn(config.rope, *args.angles, row % args.positions, small + row * small_size + latent.rank);
  });
  key_value_->forward(packed, rows, expanded, pool);
  std::fill_n(rooms.q.data(), rows * heads * dim, 0.0F);
  std::fill_n(rooms.k.data(), rows * heads * dim, 0.0F);
  std::fill_n(rooms.v.data(), rows * heads * dim, 0.0F);
  for_rows(rows, pool, [&](std::int64_t row) {
    const float* const key_turned = small + row * small_size + latent.rank;
    for (std::int64_t n = 0; n < heads; ++n) {
      const std::int64_t to = (row * heads + n) * dim;
      float* const q = rooms.q.data() + to;
      std::copy_n(queries + (row * heads + n) * query_dim, query_dim, q);
      turn(config.rope, *args.angles, row % args.positions, q + latent.plain_dim);
      const float* const key = expanded + (row * heads + n) * pair;
      std::copy_n(key, latent.plain_dim, rooms.k.data() + to);
      std::copy_n(key_turned, latent.rope_dim, rooms.k.data() + to + latent.plain_dim);
      std::copy_n(key + latent.plain_dim, config.value_dim, rooms.v.data() + to);
    }
  });
}

void ReleasedAttention::forward(const ReleasedAttentionArgs& args, ThreadPool* pool) const {
  const ReleasedConfig& config = *config_;
  const std::int64_t rows = args.batch * args.positions, dim = config.head_dim();
  const std::int64_t of_q = config.heads * dim, of_k = config.kv_heads * dim;
  AttentionRooms& rooms = *args.rooms;
  float* const q = rooms.q.reserve(rows * of_q);
  float* const k = rooms.k.reserve(rows * of_k);
  float* const v = rooms.v.reserve(rows * of_k);
  float* const mixed = rooms.mixed.reserve(rows * of_q);
  if (config.latent.rank > 0) {
    make_latent_rows(args, pool);
  } else {
    make_rows(args, pool);
  }
  AttentionArgs attend{.shape = {.batch = args.batch,
                                 .queries = args.positions,
                                 .keys = args.positions,
                                 .heads = config.heads,
                                 .kv_heads = config.kv_heads,
                                 .head_dim = dim},
                       .q = {q, of_q, args.positions * of_q},
                       .k = {k, of_k, args.positions * of_k},
                       .v = {v, of_k, args.positions * of_k},
                       .out = {mixed, of_q, args.positions * of_q},
                       .lse = nullptr,
                       .pool = pool,
                       .scale = config.score_scale,
                       .window = window_,
                       .sinks = sinks_.empty() ? nullptr : sinks_.data()};
  if (args.cache != nullptr) {
    const std::int64_t sequence = args.cache->capacity * of_k, before = args.cache->length;
    for (std::int64_t b = 0; b < args.batch; ++b) {
      const std::int64_t from = b * args.positions * of_k, to = b * sequence + before * of_k;
      std::copy_n(k + from, args.positions * of_k, args.kept->keys.data() + to);
      std::copy_n(v + from, args.positions * of_k, args.kept->values.data() + to);
    }
    attend.shape.keys = before + args.positions;
    attend.k = {args.kept->keys.data(), of_k, sequence};
    attend.v = {args.kept->values.data(), of_k, sequence};
  }
  attention(attend);
  if (config.value_dim < dim) {
    for (std::int64_t head = 1; head < rows * config.heads; ++head) {
      std::copy_n(mixed + head * dim, config.value_dim, mixed + head * config.value_dim);
    }
  }
  out_.forward(mixed, rows, args.out, pool);
}

}  // namespace switchyard::models
