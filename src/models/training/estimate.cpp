// What a run will take.
#include <algorithm>

#include "models/counts.hpp"
#include "models/device_model.hpp"
#include "switchyard/models/trainer.hpp"

namespace switchyard::models {
namespace {

/// Bytes that ranks together have and one alone has not, besides what each has of the parameters:
/// docs/architecture.md, "The way back", and src/comm/exchange_layout.hpp.
double exchange_bytes(const ModelConfig& config, DType compute, std::int64_t tokens,
                      const TrainPlace& place) {
  const auto all = static_cast<double>(tokens);
  const auto hidden = static_cast<double>(config.hidden);
  const auto picks = static_cast<double>(config.top_k);
  const auto inner = static_cast<double>(config.inner);
  const int ranks = place.ranks;
  const double row = hidden * static_cast<double>(size_of(compute)) + 8 * picks;
  const double homes = std::min(ranks, config.top_k);  // ranks that a token is sent to, at most
  // Windows, as large as if all tokens came to each rank: two buffers of rows and dout; sums home.
  const double windows = all * (ranks * 3 * row + homes * 8 * hidden);
  // A copy of the rows that came, their sums there and back.
  const double received = all * homes * (row + 8 * hidden);
  const auto layers = static_cast<double>(config.layers - config.first_dense);
  if (place.backend == Backend::kCuda) return layers * (windows + received);
  // How many rows experts have differs from step to step. Buffers that grow for them leave their
  // place behind: as much again as pre-activations, intermediates and rows of dx.
  const double grown = all * picks * 4 * (3 * inner + hidden);
  // Of one rank's sums over ranks, in chunks of at most 64 Ki values a rank: parts and sums.
  const auto of_sums = [&](std::int64_t values) {
    return 8 * static_cast<double>(ranks) *
           static_cast<double>(std::min<std::int64_t>(1 << 16, (values + ranks - 1) / ranks));
  };
  const std::int64_t replicated =
      config.hidden * (std::int64_t{config.experts} + 3 * config.shared_inner);
  return layers * (windows + received + grown) +
         ranks * (layers * of_sums(replicated) + of_sums(config.vocabulary * config.hidden));
}

/// Of one GPU that has `tokens` of its own a call, and for whose experts `come` may come: what
/// src/models/gpu/model.hpp (LayerRooms), SavedForward and src/layer/gpu/scratch.hpp have. Without
/// what CUDA and cuBLAS take: some 0.2 to 0.5 GB.
double device_activations(const ModelConfig& config, DType compute, double tokens, double come,
                          bool recompute) {
  const auto c = static_cast<double>(size_of(compute));
  const auto hidden = static_cast<double>(config.hidden), dim = double(config.head_dim);
  const double heads = config.heads, kv_heads = config.kv_heads;
  const auto layers = static_cast<double>(config.layers), picks = double(config.top_k);
  const double of_q = heads * dim, qkv = static_cast<double>(config.qkv_columns());
  // The stream before and behind attention; what products take; scales and sums of rows.
  const double of_layer = 8 * hidden + c * (2 * hidden + qkv + (of_q + kv_heads * dim) + of_q) +
                          4 * (2 + 2 * heads + kv_heads) + 8 * picks + 4 * double(config.experts);
  double kept = recompute ? 0 : c * come * preactivations(config);
  // Of a chain: what its iterations but the first take in, and what goes on between them.
  if (config.first_dense < config.layers) {
    const RouterConfig router = layer_config(config).router;
    if (router.is_chain()) {
      kept += tokens * (layers - config.first_dense) * hidden *
              (c * (router.num_gates() - 1) + 8 + (c < 4 ? c : 0));
    }
  }
  // The stream behind the last layer, whose place its gradient takes; that as products take it;
  // what the experts give.
  const double stream = (4 + (c < 4 ? c : 0)) * hidden + c * hidden;
  const auto vocabulary = static_cast<double>(config.vocabulary);
  const double piece = std::min(tokens, std::max(128.0, double(512 << 20) / (4 * vocabulary)));
  // Logits by pieces and the last norm, or a layer's gradients; what attention gives.
  const double logits = piece * vocabulary * (4 + c) + c * tokens * hidden;
  const double between = std::max(logits, c * tokens * qkv) + c * tokens * std::max(hidden, of_q);
  // Of one layer: rows between the products, whose place that takes, and behind them.
  const double inner = double(std::max(config.inner * config.top_k, config.dense_inner));
  const double scratch =
      std::max(between, c * come * inner) + c * come * picks * hidden + c * tokens * hidden;
  return tokens * (layers * of_layer + stream + 4 * (2 + heads)) + kept + scratch;
}

/// Of `all` numbers those that have moments: without routed experts where these are frozen. The
/// other groups are small beside them, and count.
double learning(const TrainConfig& config, const ModelCounts& counts, double all) {
  if (config.model.adapters) return static_cast<double>(counts.adapters);
  const bool experts_learn =
      std::find(config.freeze.begin(), config.freeze.end(), Group::kExperts) == config.freeze.end();
  return experts_learn ? all : all - static_cast<double>(counts.routed);
}

}  // namespace

TrainEstimate estimate_training(const TrainConfig& config, std::int64_t steps, double peak_flops,
                                double bytes_per_s, const TrainPlace& place) {
  const ModelCounts counts = count(config.model);
  const std::int64_t batch = config.sequences * config.model.sequence;
  const std::int64_t tokens = batch / config.accumulate;
  const auto all = static_cast<double>(counts.parameters);
  const double alike = all - static_cast<double>(counts.routed);
  const double held = all + (place.ranks - 1) * alike;  // by all ranks together
  TrainEstimate estimate;
  estimate.tokens = steps * batch;
  estimate.flops = counts.flops_per_token * static_cast<double>(estimate.tokens);
  const double moved = learning(config, counts, held);
  estimate.seconds = estimate.flops / (kExpectedShare * peak_flops) +
                     static_cast<double>(steps) * 32 * moved / bytes_per_s;
  TrainMemory& memory = estimate.memory;
  memory.gradients = 4 * held;
  memory.moments = 8 * moved;
  const auto call = static_cast<double>(tokens);
  if (place.backend == Backend::kCuda) {
    refuse_on_gpu(config.model);
    // Four bytes each, split or not; in bf16 an embedding is f32 beside them.
    memory.weights = 4 * held;
    if (config.compute != DType::kF32) {
      memory.weights +=
          4.0 * place.ranks * static_cast<double>(config.model.vocabulary * config.model.hidden);
    }
    memory.activations =
        place.ranks *
        device_activations(config.model, config.compute, call / place.ranks, call, place.recompute);
  } else {
    memory.weights = counts.fixed_bytes +
                     (place.ranks - 1) * (counts.fixed_bytes - counts.routed_bytes) -
                     memory.gradients;
    memory.activations = counts.token_bytes * call;
    if (place.recompute) memory.activations -= 4 * call * preactivations(config.model);
  }
  if (place.ranks > 1) {
    memory.exchange = exchange_bytes(config.model, config.compute, tokens, place);
  }
  estimate.bytes = memory.total();
  estimate.checkpoint_bytes = 4 * all + 8 * learning(config, counts, all);
  return estimate;
}

}  // namespace switchyard::models
