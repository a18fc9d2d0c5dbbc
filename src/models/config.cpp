// What a configuration must be, and what follows from it.
#include "switchyard/models/config.hpp"

#include <algorithm>
#include <cmath>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "models/counts.hpp"
#include "switchyard/routing/router_kinds.hpp"

namespace switchyard::models {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 30;
constexpr std::int32_t kMostAdapters = 65536;
constexpr std::int64_t kMostRank = 65536;

void require_size(const char* name, std::int64_t value, std::int64_t least) {
  require(value >= least && value <= kMost, "{}={} is not in {} to {}", name, value, least, kMost);
}

void check_attention(const ModelConfig& config) {
  require_size("heads", config.heads, 1);
  require_size("kv_heads", config.kv_heads, 1);
  require(config.heads % config.kv_heads == 0, "kv_heads={} does not divide heads={}",
          config.kv_heads, config.heads);
  require_size("head_dim", config.head_dim, 2);
  require(config.head_dim % 2 == 0, "head_dim={} is odd: positions turn pairs", config.head_dim);
  require(config.rope_theta > 1 && std::isfinite(config.rope_theta),
          "rope_theta={} is not a number above 1", config.rope_theta);
}

/// Slots are full whatever the router says: there is nothing to even, to drop or to move.
void check_soft_moe(const ModelConfig& config, const SoftMoeConfig& soft) {
  require(soft.slots <= kMost / config.experts, "the router {}: {} slots of {} experts, at most {}",
          config.router, soft.slots, config.experts, kMost / config.experts);
  if (soft.causal) {
    require(soft.group > 0 && soft.group < config.sequence,
            "the router {}: tokens read the slots of the group before theirs, want a group below "
            "the sequence of {}",
            config.router, config.sequence);
  } else {
    require(soft.group == 0 || soft.group == config.sequence,
            "the router {}: of a model the group is a sequence, want group=0, or causal=yes",
            config.router);
  }
  for (const auto& [name, value] :
       {std::pair("capacity_factor", config.capacity_factor.value_or(0)),
        std::pair("bias_rate", config.bias_rate),
        std::pair("shared_inner", double(config.shared_inner))}) {
    require(value == 0, "{}={}: the router {} of a model has none", name, value, config.router);
  }
  check(config.losses, config.experts);
  require(
      !config.losses.any(),
      "losses are of a router's logits over its experts, and the router {} has them over slots: "
      "want balance={}, z={}, importance={} and entropy={} to be 0",
      config.router, config.losses.balance, config.losses.z, config.losses.importance,
      config.losses.entropy);
}

void check_experts(const ModelConfig& config) {
  require_size("experts", config.experts, 1);
  require_size("inner", config.inner, 1);
  require_size("shared_inner", config.shared_inner, 0);
  require(!config.shared_gated || config.shared_inner > 0,
          "shared_gated without shared experts: shared_inner is 0");
  require(!config.capacity_factor ||
              (std::isfinite(*config.capacity_factor) && *config.capacity_factor > 0),
          "capacity_factor={} is not positive", config.capacity_factor.value_or(0));
  require(std::isfinite(config.bias_rate) && config.bias_rate >= 0,
          "bias_rate={} is not a number from 0", config.bias_rate);
  if (const auto soft = soft_moe_config(config)) return check_soft_moe(config, *soft);
  const LayerConfig layer = layer_config(config);
  check(layer);
  check(config.losses, config.experts);
  const std::string kind = config.router.substr(0, config.router.find(':'));
  require(layer.router.zero_computation.total() == 0,
          "the router {}: models have no zero-computation experts, layers do (MoeLayer, sw.Layer); "
          "adamoe's null experts are as its zero ones",
          kind);
  require(config.bias_rate == 0 ||
              (layer.router.is_top_k() && layer.router.as_top_k().score != Score::kSparseMixer),
          "bias_rate={}: the router {} takes no selection bias", config.bias_rate, kind);
  require(config.bias_rate == 0 || !layer.router.is_chain(),
          "bias_rate={}: nobody moves the biases of the {} gates of the router {}; want losses, "
          "balance=0.01 say",
          config.bias_rate, layer.router.num_gates(), kind);
  require(config.losses.scope != LossScope::kGlobal,
          "losses of scope global want counts of other ranks; a model is on one");
  require(!config.losses.any() || takes_losses(config),
          "losses are of a router's logits over its experts, which the router {} has not: want "
          "balance={}, z={}, importance={} and entropy={} to be 0",
          kind, config.losses.balance, config.losses.z, config.losses.importance,
          config.losses.entropy);
  const bool by_top_k =
      layer.router.is_top_k() && layer.router.as_top_k().score != Score::kSparseMixer;
  require(!config.capacity_factor || config.drop_policy != DropPolicy::kReroute || by_top_k,
          "drop_policy=reroute: nothing says which expert is the next best of the router {} but "
          "scores of top-k",
          config.router);
  require(!layer.router.is_variable() || !config.capacity_factor,
          "capacity_factor={}: the router {} gives a token any number of experts",
          config.capacity_factor.value_or(0), kind);
}

void check_adapters(const ModelConfig& config) {
  const AdapterConfig& adapters = *config.adapters;
  const char* const kind = to_string(adapters.kind);
  require(config.first_dense < config.layers,
          "adapters of kind {}: all {} layers are dense, adapters want a MoE layer", kind,
          config.layers);
  require(adapters.num_adapters >= 1 && adapters.num_adapters <= kMostAdapters,
          "adapters: num_adapters={} is not in 1 to {}", adapters.num_adapters, kMostAdapters);
  require(adapters.rank >= 1 && adapters.rank <= kMostRank, "adapters: rank={} is not in 1 to {}",
          adapters.rank, kMostRank);
  require(adapters.alpha != 0 && std::isfinite(adapters.alpha),
          "adapters: alpha={}, want a number that is not 0", adapters.alpha);
  require(adapters.kind != PerftKind::kEmbedded || adapters.num_adapters == config.experts,
          "adapters: num_adapters={} of kind embedded, want the {} of the model's experts",
          adapters.num_adapters, config.experts);
  require(!soft_moe_config(config), "adapters of kind {}: the router {} has none beside it", kind,
          config.router);
  require(
      adapters.kind != PerftKind::kEmbedded || !layer_config(config).router.is_chain(),
      "adapters of kind embedded have the routing of their layer, and the router {} has one for "
      "each iteration",
      config.router);
  require(adapters.kind != PerftKind::kRouted ||
              (adapters.top_k >= 1 && adapters.top_k <= adapters.num_adapters),
          "adapters: top_k={}, want 1 to num_adapters={}", adapters.top_k, adapters.num_adapters);
  check(perft_config(config));
}

/// Numbers of the tensors of one layer: all, and those in products for a token; of adapters among
/// them.
struct LayerCounts {
  std::int64_t all = 0, active = 0, adapters = 0, active_adapters = 0;
};

std::int64_t group_of(const SoftMoeConfig& soft, const ModelConfig& config) {
  return soft.group == 0 ? config.sequence : soft.group;
}

LayerCounts count_layer(const ModelConfig& config, std::int32_t l) {
  const std::int64_t hidden = config.hidden, dim = config.head_dim;
  const std::int64_t of_q = config.heads * dim, of_k = config.kv_heads * dim;
  LayerCounts counts;
  counts.active = hidden * (2 * of_q + 2 * of_k);
  counts.all = counts.active + 2 * hidden;
  if (config.qk_norm == QkNorm::kHead) counts.all += 2 * dim;
  if (config.qk_norm == QkNorm::kWhole) counts.all += of_q + of_k;
  if (config.is_dense(l)) {
    counts.all += 3 * hidden * config.dense_inner;
    counts.active += 3 * hidden * config.dense_inner;
    return counts;
  }
  const std::int64_t each = 3 * hidden * config.inner;
  if (const auto soft = soft_moe_config(config)) {
    // Of a token: logits, its part of slots, and what it reads of them; its share of the slots.
    const std::int64_t slots = config.experts * soft->slots;
    counts.all += config.experts * each + slots * hidden + 1;
    counts.active += 3 * slots * hidden + slots * each / group_of(*soft, config);
    return counts;
  }
  const RouterConfig router = layer_config(config).router;
  const std::int64_t shared = 3 * hidden * config.shared_inner + (config.shared_gated ? hidden : 0);
  std::int64_t gate = 0;
  if (router.has_logits()) {
    gate = router.gate_rows() * router.network.features(hidden) + router.network.size(hidden);
  }
  if (router.noise.kind == RouterNoise::Kind::kLearned) gate += router.num_logits() * hidden;
  counts.all += config.experts * each + shared + gate;
  counts.active += config.top_k * each + router.num_gates() * shared + gate;
  if (config.adapters) {
    const PerftConfig adapters = perft_config(config);
    const std::int64_t one = 2 * adapters.rank * hidden;
    const std::int64_t idle = adapters.num_adapters - config.adapters->active(config.top_k);
    counts.adapters = adapters.num_parameters();
    counts.active_adapters = counts.adapters - idle * one;
    counts.all += counts.adapters;
    counts.active += counts.active_adapters;
  }
  return counts;
}

}  // namespace

const char* to_string(QkNorm norm) noexcept {
  switch (norm) {
    case QkNorm::kNone: return "none";
    case QkNorm::kHead: return "head";
    case QkNorm::kWhole: return "whole";
  }
  return "?";
}

std::int32_t AdapterConfig::active(std::int32_t layer_top_k) const {
  switch (kind) {
    case PerftKind::kRouted: return top_k;
    case PerftKind::kEmbedded: return layer_top_k;
    case PerftKind::kDense:
    case PerftKind::kShared: return num_adapters;
  }
  return num_adapters;
}

std::int32_t usual_num_adapters(PerftKind kind, std::int32_t experts) {
  if (kind == PerftKind::kEmbedded) return experts;
  return kind == PerftKind::kShared ? 1 : AdapterConfig{}.num_adapters;
}

PerftConfig perft_config(const ModelConfig& config) {
  require(config.adapters.has_value(), "the model has no adapters");
  const AdapterConfig& of = *config.adapters;
  PerftConfig perft{.kind = of.kind,
                    .num_adapters = of.num_adapters,
                    .hidden = config.hidden,
                    .rank = of.rank,
                    .alpha = of.alpha,
                    .activation = of.activation};
  if (of.kind == PerftKind::kEmbedded) perft.router = layer_config(config).router;
  if (of.kind == PerftKind::kRouted) {
    perft.router = {.num_experts = of.num_adapters,
                    .kind = TopKRouter{.top_k = of.top_k, .renormalize = of.renormalize}};
  }
  return perft;
}

void check(const ModelConfig& config) {
  require_size("vocabulary", config.vocabulary, 1);
  require_size("hidden", config.hidden, 1);
  require_size("layers", config.layers, 1);
  require_size("sequence", config.sequence, 1);
  require(config.norm_epsilon >= 0 && std::isfinite(config.norm_epsilon),
          "norm_epsilon={} is not a number from 0", config.norm_epsilon);
  check_attention(config);
  require(config.first_dense >= 0 && config.first_dense <= config.layers,
          "first_dense={} is not in 0 to layers={}", config.first_dense, config.layers);
  if (config.first_dense > 0) require_size("dense_inner", config.dense_inner, 1);
  // A dense model may have none; those that it names are right.
  if (config.first_dense < config.layers || config.experts != 0) check_experts(config);
  if (config.adapters) check_adapters(config);
}

std::optional<SoftMoeConfig> soft_moe_config(const ModelConfig& config) {
  return parse_soft_moe(config.router);
}

double experts_of_token(const ModelConfig& config) {
  const auto soft = soft_moe_config(config);
  if (!soft) return config.top_k;
  return static_cast<double>(config.experts * soft->slots) /
         static_cast<double>(group_of(*soft, config));
}

bool takes_losses(const ModelConfig& config) {
  if (soft_moe_config(config)) return false;
  const RouterConfig router = layer_config(config).router;
  return router.has_logits() && router.num_logits() == router.num_experts;
}

LayerConfig layer_config(const ModelConfig& config) {
  RouterConfig base{.num_experts = config.experts};
  base.kind = TopKRouter{.top_k = config.top_k};
  LayerConfig layer;
  layer.router = parse_router(config.router, base);
  if (auto* choice = std::get_if<ExpertChoiceRouter>(&layer.router.kind)) {
    if (choice->group == 0) choice->group = config.sequence;
  }
  layer.experts = {.num_experts = config.experts, .hidden = config.hidden, .inner = config.inner};
  if (config.shared_inner > 0) {
    layer.shared = {.num_experts = 1, .hidden = config.hidden, .inner = config.shared_inner};
    layer.shared_gated = config.shared_gated;
  }
  return layer;
}

std::optional<std::int32_t> taken_top_k(const ModelConfig& config) {
  if (config.first_dense == config.layers || soft_moe_config(config)) return std::nullopt;
  const RouterConfig router = layer_config(config).router;
  if (router.is_variable() || router.num_logits() > router.num_experts) return std::nullopt;
  return router.num_gates() * router.top_k();
}

double expert_flops(const ModelConfig& config, std::int32_t layer) {
  const std::int64_t attention =
      config.hidden * 2 * config.head_dim * (config.heads + config.kv_heads);
  return 2 * static_cast<double>(count_layer(config, layer).active - attention);
}

double preactivations(const ModelConfig& config) {
  const std::int64_t dense = std::int64_t{config.first_dense} * config.dense_inner;
  const std::int64_t routed = config.layers - config.first_dense;
  if (routed == 0) return 2 * static_cast<double>(dense);
  if (soft_moe_config(config)) {
    return 2 * (static_cast<double>(dense) +
                static_cast<double>(routed * config.inner) * experts_of_token(config));
  }
  const std::int64_t each =
      config.top_k * config.inner + layer_config(config).router.num_gates() * config.shared_inner;
  return 2 * static_cast<double>(dense + routed * each);
}

ModelCounts count(const ModelConfig& config) {
  check(config);
  ModelCounts counts;
  const std::int64_t table = config.vocabulary * config.hidden;
  counts.parameters = (config.tied ? 1 : 2) * table + config.hidden;
  counts.active = table;
  double experts = 0, kept = preactivations(config), routed_layers = 0;
  std::int64_t learning = 0;  // active numbers that gradients are wanted of
  for (std::int32_t l = 0; l < config.layers; ++l) {
    const LayerCounts layer = count_layer(config, l);
    counts.parameters += layer.all;
    counts.active += layer.active;
    counts.adapters += layer.adapters;
    learning += layer.active_adapters;
    if (!config.is_dense(l)) {
      counts.routed += 3 * config.hidden * config.inner * config.experts;
      ++routed_layers;
    }
    experts += static_cast<double>(layer.all);
  }
  const auto width = static_cast<double>(config.head_dim);
  const double heads = static_cast<double>(config.heads), kv_heads = config.kv_heads;
  const auto layers = static_cast<double>(config.layers);
  if (!config.adapters) learning = counts.active;
  // Forward, gradients of what products read, gradients of what they multiply with.
  const double attention = 2 * layers * static_cast<double>(config.sequence) * heads * width;
  counts.forward_flops_per_token = 2 * static_cast<double>(counts.active) + attention;
  counts.flops_per_token =
      4 * static_cast<double>(counts.active) + 2 * static_cast<double>(learning) + 3 * attention;
  // Values, gradients, packed weights (dense products have them both ways).
  counts.fixed_bytes =
      4 * (2 * static_cast<double>(counts.parameters) + experts + 4 * static_cast<double>(table));
  counts.routed_bytes = 4 * 3 * static_cast<double>(counts.routed);
  // Activations of each layer (model.cpp: x, norms, middle, qkv, turned, mixed; the experts'
  // pre-activations) and what its MoeLayer keeps for its backward (dout, a row for each pick, two
  // sums); gradients, logits, rows and intermediate of one layer's experts.
  const auto hidden = static_cast<double>(config.hidden);
  const double picks = experts_of_token(config);
  const double of_layer = (7 + picks) * hidden + width * (3 * heads + 3 * kv_heads);
  const double inner =
      std::max(static_cast<double>(config.inner) * picks, static_cast<double>(config.dense_inner));
  const auto soft = soft_moe_config(config);
  // Of Soft-MoE: what each layer keeps, tokens, logits and slots; weights of one layer.
  if (soft && routed_layers > 0) {
    const auto slots = static_cast<double>(config.experts * soft->slots);
    kept += routed_layers * (hidden + slots + 2 * picks * hidden) + 2 * slots;
  }
  // Of a network of the router: what each layer keeps, and one layer's gradient.
  if (routed_layers > 0 && !soft) {
    const RouterConfig router = layer_config(config).router;
    if (!router.network.is_linear()) {
      kept += (routed_layers + 1) * static_cast<double>(router.network.inner(config.hidden));
    }
    // Of a chain: what its iterations but the first take in, and what goes on between them.
    if (router.is_chain()) kept += routed_layers * (router.num_gates() + 1) * hidden;
  }
  if (config.adapters) {
    // Of each layer the adapters' copy of the input and their dout, sums and rows, as above; of one
    // layer gradients of the input, and rows of adapters there and back.
    const auto own = static_cast<double>(config.adapters->active(config.top_k));
    const auto rank = static_cast<double>(config.adapters->rank);
    kept += routed_layers * ((6 + own) * hidden + own * rank) + (1 + own) * hidden + 2 * own * rank;
  }
  counts.token_bytes =
      4 * (layers * of_layer + kept + (6 + picks) * hidden + 2 * inner +
           width * (2 * heads + 2 * kv_heads) + static_cast<double>(config.vocabulary));
  return counts;
}

}  // namespace switchyard::models
