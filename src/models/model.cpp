// The model as a list of calls: run() is its forward, loss_and_gradients() what comes before and
// behind. Each layer's forward and backward stand side by side. What the calls compute is said in
// models/cpu/*.hpp; shapes are suffixes of names there and in activations.hpp.
#include "switchyard/models/model.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "core/row_ops.hpp"
#include "models/cpu/cross_entropy.hpp"
#include "models/cpu/embedding.hpp"
#include "models/cpu/rms_norm.hpp"
#include "models/model_state.hpp"

namespace switchyard::models {
namespace {

void add_rows(const float* from, const float* to_add, std::int64_t rows, std::int64_t cols,
              float* out, ThreadPool* pool) {
  constexpr std::int64_t kRows = 64;
  parallel_for(pool, (rows + kRows - 1) / kRows, [&](std::int64_t task, int) {
    const std::int64_t first = task * kRows * cols;
    const std::int64_t size = std::min(kRows, rows - task * kRows) * cols;
    std::copy_n(from + first, size, out + first);
    row_ops::add(to_add + first, out + first, size);
  });
}

/// Of the operands of dense products.
DType dense_type(const ModelOptions& options) {
  return options.compute == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

}  // namespace

void refuse_on_gpu(const ModelConfig& config) {
  if (config.first_dense == config.layers) return;
  if (config.adapters) {
    fail(ErrorCode::kUnsupported,
         "adapters of kind {} run on a CPU so far: a model with adapters has no GPU",
         to_string(config.adapters->kind));
  }
  if (soft_moe_config(config)) {
    fail(
        ErrorCode::kUnsupported,
        "the router {} of a model runs on a CPU so far, not on a GPU: of C++ and Python soft_moe() "
        "does",
        config.router);
  }
  const LayerConfig layer = layer_config(config);
  if (layer.router.network.is_linear()) return;
  fail(ErrorCode::kUnsupported, "the router {} runs on a CPU so far, not on a GPU: network={}",
       config.router, to_string(layer.router.network.kind));
}

Model::State::State(const ModelConfig& asked, const ModelOptions& how)
    : config(asked),
      options(how),
      ranks(ranks_of(how)),
      pool(how.num_threads, ranks == nullptr ? ThreadRuntime::kAuto : ThreadRuntime::kOwn),
      threads(pool.num_threads() > 1 ? &pool : nullptr),
      parameters(config, how.seed, experts_of(config, how), how.frozen, threads),
      query_key(config),
      head(config.hidden, config.vocabulary, dense_type(options)) {
  if (options.backend == Backend::kCuda) {
    refuse_on_gpu(config);
    device = make_device_model(config, options, parameters);
    return;
  }
  for (std::int32_t l = 0; l < config.layers; ++l) {
    const DType dtype = dense_type(options);
    attention.push_back({Linear(config.hidden, query_key.qkv_cols(), dtype),
                         Linear(config.heads * config.head_dim, config.hidden, dtype)});
    blocks.emplace_back(config, options, parameters, l, threads);
  }
  kept.layers.resize(static_cast<std::size_t>(config.layers) + 1);
}

void Model::State::pack() {
  if (!stale) return;
  clock.time("pack", 0, [&] {
    for (std::int32_t l = 0; l < config.layers; ++l) {
      AttentionWeights& weights = attention[static_cast<std::size_t>(l)];
      weights.qkv.pack(parameters.value(parameters.layer(l).qkv), threads);
      weights.out.pack(parameters.value(parameters.layer(l).o), threads);
    }
    head.pack(parameters.value(parameters.head()), threads);
  });
  stale = false;
}

void Model::State::pack_backward() {
  if (!stale_backward) return;
  clock.time("pack", 0, [&] {
    for (std::int32_t l = 0; l < config.layers; ++l) {
      AttentionWeights& weights = attention[static_cast<std::size_t>(l)];
      weights.qkv.pack_backward(parameters.value(parameters.layer(l).qkv), threads);
      weights.out.pack_backward(parameters.value(parameters.layer(l).o), threads);
    }
    head.pack_backward(parameters.value(parameters.head()), threads);
  });
  stale_backward = false;
}

const float* Model::State::run(const Call& call) {
  pack();
  const std::int64_t num_tokens = call.size(), hidden = config.hidden;
  float* const x = kept.layers[0].x.reserve(num_tokens * hidden);
  clock.time("embedding", 0, [&] {
    embed({.ids = call.tokens.data,
           .num_tokens = num_tokens,
           .vocabulary = config.vocabulary,
           .hidden = hidden,
           .pool = threads},
          parameters.value(parameters.embedding()), x);
  });
  // Without a backward one layer's memory serves all.
  const auto place = [&](std::int32_t l) {
    return static_cast<std::size_t>(call.training ? l : 0);
  };
  for (std::int32_t l = 0; l < config.layers; ++l) {
    LayerActivations& layer = kept.layers[place(l)];
    attention_forward(call, l, layer);
    block_forward(call, l, layer, kept.layers[place(l + 1)].x.reserve(num_tokens * hidden));
  }
  clock.time("norms", 0, [&] {
    rms_norm({.x = kept.layers[place(config.layers)].x.data(),
              .weight = parameters.value(parameters.norm()),
              .rows = num_tokens,
              .size = hidden,
              .epsilon = config.norm_epsilon,
              .y = kept.norm.reserve(num_tokens * hidden),
              .scale = kept.scale.reserve(num_tokens),
              .pool = threads});
  });
  return kept.norm.data();
}

QueryKeyRows::Args Model::State::query_key_args(const Call& call, std::int32_t l,
                                                const LayerActivations& layer) {
  return {.batch = call.tokens.shape[0],
          .positions = call.tokens.shape[1],
          .first = call.before(),
          .qkv = layer.qkv.data(),
          .q_weight = parameters.value(parameters.layer(l).q_norm),
          .k_weight = parameters.value(parameters.layer(l).k_norm),
          .turned = layer.turned.data(),
          .scales = layer.qk_scale.data(),
          .pool = threads};
}

AttentionArgs Model::State::attention_args(const Call& call, std::int32_t l,
                                           const LayerActivations& layer) {
  const auto [batch, positions] = call.tokens.shape;
  const std::int64_t qk = query_key.qk_cols(), qkv = query_key.qkv_cols();
  const std::int64_t of_q = config.heads * config.head_dim;
  const std::int64_t of_k = config.kv_heads * config.head_dim;
  AttentionArgs args{.shape = {.batch = batch,
                               .queries = positions,
                               .keys = call.before() + positions,
                               .heads = config.heads,
                               .kv_heads = config.kv_heads,
                               .head_dim = config.head_dim},
                     .q = {layer.turned.data(), qk, positions * qk},
                     .k = {layer.turned.data() + of_q, qk, positions * qk},
                     .v = {layer.qkv.data() + qk, qkv, positions * qkv},
                     .out = {layer.mixed.data(), of_q, positions * of_q},
                     .lse = call.training ? layer.lse.data() : nullptr,
                     .pool = threads};
  if (call.cache == nullptr) return args;
  Cache::State::Layer& cache = call.cache->layers[static_cast<std::size_t>(l)];
  const std::int64_t sequence = call.cache->capacity * of_k;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < positions; ++i) {
      const std::int64_t to = b * sequence + (call.cache->length + i) * of_k;
      std::copy_n(args.k.at(b, i), of_k, cache.keys.data() + to);
      std::copy_n(args.v.at(b, i), of_k, cache.values.data() + to);
    }
  }
  args.k = {cache.keys.data(), of_k, sequence};
  args.v = {cache.values.data(), of_k, sequence};
  return args;
}

void Model::State::attention_forward(const Call& call, std::int32_t l, LayerActivations& layer) {
  const std::int64_t num_tokens = call.size(), hidden = config.hidden;
  const AttentionWeights& weights = attention[static_cast<std::size_t>(l)];
  const std::int64_t of_q = config.heads * config.head_dim;
  float* const norm = layer.norm1.reserve(num_tokens * hidden);
  float* const scale = layer.scale1.reserve(num_tokens);
  clock.time("norms", 0, [&] {
    rms_norm({.x = layer.x.data(),
              .weight = parameters.value(parameters.layer(l).norm1),
              .rows = num_tokens,
              .size = hidden,
              .epsilon = config.norm_epsilon,
              .y = norm,
              .scale = scale,
              .pool = threads});
  });
  float* const qkv = layer.qkv.reserve(num_tokens * query_key.qkv_cols());
  clock.time("qkv", products(num_tokens, hidden, query_key.qkv_cols()),
             [&] { weights.qkv.forward(norm, num_tokens, qkv, false, threads); });
  layer.turned.reserve(num_tokens * query_key.qk_cols());
  layer.qk_scale.reserve(std::max<std::int64_t>(1, num_tokens * query_key.scales()));
  clock.time("rope", 0, [&] { query_key.forward(query_key_args(call, l, layer)); });
  layer.mixed.reserve(num_tokens * of_q);
  layer.lse.reserve(num_tokens * config.heads);
  const double positions = static_cast<double>(call.before()) * 2 + double(call.tokens.shape[1]);
  clock.time("attention", 2.0 * positions * static_cast<double>(num_tokens * of_q),
             [&] { models::attention(attention_args(call, l, layer)); });
  float* const middle = layer.middle.reserve(num_tokens * hidden);
  clock.time("attention out", products(num_tokens, of_q, hidden), [&] {
    std::copy_n(layer.x.data(), num_tokens * hidden, middle);
    weights.out.forward(layer.mixed.data(), num_tokens, middle, true, threads);
  });
}

void Model::State::attention_backward(const Call& call, std::int32_t l, bool accumulate) {
  const std::int64_t num_tokens = call.size(), hidden = config.hidden;
  const LayerActivations& layer = kept.layers[static_cast<std::size_t>(l)];
  const LayerTensors& tensors = parameters.layer(l);
  const AttentionWeights& weights = attention[static_cast<std::size_t>(l)];
  const std::int64_t of_q = config.heads * config.head_dim, qkv = query_key.qkv_cols();
  const std::int64_t positions = call.tokens.shape[1];
  float* const dstream = kept.dstream.data();
  float* const dmixed = kept.dmixed.reserve(num_tokens * of_q);
  float* const dqkv = kept.dqkv.reserve(num_tokens * qkv);
  float* const dnorm = kept.dnorm.data();
  clock.time("attention out backward", 2 * products(num_tokens, of_q, hidden), [&] {
    weights.out.backward_input(dstream, num_tokens, dmixed, threads);
    weights.out.backward_weights(dstream, layer.mixed.data(), num_tokens,
                                 parameters.gradient(tensors.o), accumulate, threads);
  });
  const double work = 4.0 * static_cast<double>(num_tokens * of_q) * static_cast<double>(positions);
  clock.time("attention backward", work, [&] {
    float* const dk = dqkv + of_q;
    models::attention_backward({.forward = attention_args(call, l, layer),
                                .dout = {dmixed, of_q, positions * of_q},
                                .dq = {dqkv, qkv, positions * qkv},
                                .dk = {dk, qkv, positions * qkv},
                                .dv = {dqkv + query_key.qk_cols(), qkv, positions * qkv}});
  });
  clock.time("rope backward", 0, [&] {
    query_key.backward({.forward = query_key_args(call, l, layer),
                        .dqkv = dqkv,
                        .dq_weight = parameters.gradient(tensors.q_norm),
                        .dk_weight = parameters.gradient(tensors.k_norm),
                        .accumulate = accumulate});
  });
  clock.time("qkv backward", 2 * products(num_tokens, hidden, qkv), [&] {
    weights.qkv.backward_input(dqkv, num_tokens, dnorm, threads);
    weights.qkv.backward_weights(dqkv, layer.norm1.data(), num_tokens,
                                 parameters.gradient(tensors.qkv), accumulate, threads);
  });
  clock.time("norms backward", 0, [&] {
    rms_norm_backward({.x = layer.x.data(),
                       .weight = parameters.value(tensors.norm1),
                       .scale = layer.scale1.data(),
                       .rows = num_tokens,
                       .size = hidden,
                       .dy = dnorm,
                       .dx = dstream,
                       .dweight = parameters.gradient(tensors.norm1),
                       .accumulate = accumulate,
                       .pool = threads});
  });
}

void Model::State::block_forward(const Call& call, std::int32_t l, LayerActivations& layer,
                                 float* out) {
  const std::int64_t num_tokens = call.size(), hidden = config.hidden;
  float* const norm = layer.norm2.reserve(num_tokens * hidden);
  float* const scale = layer.scale2.reserve(num_tokens);
  clock.time("norms", 0, [&] {
    rms_norm({.x = layer.middle.data(),
              .weight = parameters.value(parameters.layer(l).norm2),
              .rows = num_tokens,
              .size = hidden,
              .epsilon = config.norm_epsilon,
              .y = norm,
              .scale = scale,
              .pool = threads});
  });
  std::optional<ReadBefore> before;
  if (call.cache != nullptr) {
    before = {.rows = call.cache->layers[static_cast<std::size_t>(l)].read.data(),
              .capacity = call.cache->capacity,
              .length = call.cache->length};
  }
  float* const block = kept.block.reserve(num_tokens * hidden);
  clock.time("experts", static_cast<double>(num_tokens) * expert_flops(config, l), [&] {
    blocks[static_cast<std::size_t>(l)].forward({.x = {norm, {num_tokens, hidden}},
                                                 .ids = call.tokens.data,
                                                 .positions = call.tokens.shape[1],
                                                 .step = call.step,
                                                 .first_token = call.first_token,
                                                 .training = call.training,
                                                 .hook = call.hook,
                                                 .before = before},
                                                {block, {num_tokens, hidden}});
    add_rows(layer.middle.data(), block, num_tokens, hidden, out, threads);
  });
}

void Model::State::block_backward(const StepArgs& args, std::int32_t l) {
  const std::int64_t num_tokens = args.tokens.size(), hidden = config.hidden;
  const LayerActivations& layer = kept.layers[static_cast<std::size_t>(l)];
  const LayerTensors& tensors = parameters.layer(l);
  float* const dnorm = kept.dnorm.data();
  clock.time(
      "experts backward", 2 * static_cast<double>(num_tokens) * expert_flops(config, l), [&] {
        blocks[static_cast<std::size_t>(l)].backward({kept.dstream.data(), {num_tokens, hidden}},
                                                     {dnorm, {num_tokens, hidden}}, args.scale,
                                                     args.accumulate);
      });
  clock.time("norms backward", 0, [&] {
    rms_norm_backward({.x = layer.middle.data(),
                       .weight = parameters.value(tensors.norm2),
                       .scale = layer.scale2.data(),
                       .rows = num_tokens,
                       .size = hidden,
                       .dy = dnorm,
                       .dx = kept.dstream.data(),
                       .dweight = parameters.gradient(tensors.norm2),
                       .accumulate = args.accumulate,
                       .pool = threads});
  });
}

double Model::State::head_backward(const StepArgs& args, const float* normed,
                                   std::int64_t targets) {
  const std::int64_t num_tokens = args.tokens.size(), hidden = config.hidden;
  kept.nll.resize(static_cast<std::size_t>(num_tokens));
  float* const dnorm = kept.dnorm.reserve(num_tokens * hidden);
  float* const dhead = parameters.gradient(parameters.head());
  const double scale = targets == 0 ? 0 : args.scale / static_cast<double>(targets);
  logits_by_pieces(normed, num_tokens, [&](std::int64_t first, std::int64_t rows, float* logits) {
    clock.time("cross entropy", 0, [&] {
      cross_entropy({.logits = logits,
                     .targets = args.targets.data + first,
                     .rows = rows,
                     .vocabulary = config.vocabulary,
                     .nll = kept.nll.data() + first,
                     .backward = true,
                     .scale = static_cast<float>(scale),
                     .pool = threads});
    });
    clock.time("head backward", 2 * products(rows, hidden, config.vocabulary), [&] {
      head.backward_input(logits, rows, dnorm + first * hidden, threads);
      head.backward_weights(logits, normed + first * hidden, rows, dhead,
                            args.accumulate || first > 0, threads);
    });
  });
  float* const dstream = kept.dstream.reserve(num_tokens * hidden);
  std::fill_n(dstream, num_tokens * hidden, 0.0F);
  clock.time("norms backward", 0, [&] {
    rms_norm_backward({.x = kept.layers.back().x.data(),
                       .weight = parameters.value(parameters.norm()),
                       .scale = kept.scale.data(),
                       .rows = num_tokens,
                       .size = hidden,
                       .dy = dnorm,
                       .dx = dstream,
                       .dweight = parameters.gradient(parameters.norm()),
                       .accumulate = args.accumulate,
                       .pool = threads});
  });
  double sum = 0;
  for (const double nll : kept.nll) sum += nll;
  return sum;
}

void Model::State::embedding_backward(const StepArgs& args) {
  clock.time("embedding backward", 0, [&] {
    embed_backward({.ids = args.tokens.data,
                    .num_tokens = args.tokens.size(),
                    .vocabulary = config.vocabulary,
                    .hidden = config.hidden,
                    .pool = threads},
                   kept.dstream.data(), parameters.gradient(parameters.embedding()),
                   args.accumulate || config.tied);
  });
}

}  // namespace switchyard::models
