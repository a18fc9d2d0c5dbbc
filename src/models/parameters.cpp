#include "models/parameters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "core/check.hpp"
#include "core/philox.hpp"
#include "core/printable.hpp"
#include "core/splitmix64.hpp"

namespace switchyard::models {
namespace {

constexpr float kDeviation = 0.02F;

std::int64_t size_of_shape(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// FNV-1a.
std::uint64_t hash_of(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

/// Normal numbers [first, end) of a tensor by Box and Muller: number i is a function of (seed,
/// name, i). `first` is a multiple of 4.
void fill_normal(const std::string& name, std::uint64_t seed, float deviation, float* out,
                 std::int64_t first, std::int64_t end) {
  const std::uint64_t key = splitmix64_mix(splitmix64_mix(seed + kSplitMix64Step) + hash_of(name));
  for (std::int64_t i = first; i < end; i += 4) {
    const auto index = static_cast<std::uint64_t>(i / 4);
    const PhiloxWords words =
        philox4x32({{low_word(index), high_word(index), 0, 0}}, {low_word(key), high_word(key)});
    for (std::int64_t pair = 0; pair < 2; ++pair) {
      constexpr double kScale = 0x1p-32;
      const double u = (static_cast<double>(words.word[2 * pair]) + 0.5) * kScale;
      const double angle =
          2 * std::numbers::pi * static_cast<double>(words.word[2 * pair + 1]) * kScale;
      const double radius = double{deviation} * std::sqrt(-2 * std::log(u));
      const std::int64_t place = i + 2 * pair;
      if (place < end) out[place] = static_cast<float>(radius * std::cos(angle));
      if (place + 1 < end) out[place + 1] = static_cast<float>(radius * std::sin(angle));
    }
  }
}

}  // namespace

/// Initial values: normal ones, or a constant.
struct Parameters::Start {
  float deviation = 0;
  float constant = 0;
};

Parameters::Parameters(const ModelConfig& config, std::uint64_t seed, ExpertShare share,
                       std::span<const Group> frozen, ThreadPool* pool)
    : config_(config), share_(share), pool_(pool) {
  const std::int64_t hidden = config.hidden;
  embedding_ = add("model.embed_tokens.weight", {config.vocabulary, hidden}, Group::kEmbedding,
                   {.deviation = kDeviation});
  for (std::int32_t l = 0; l < config.layers; ++l) {
    const std::string prefix = fmt::format("model.layers.{}.", l);
    LayerTensors layer;
    layer.norm1 = add(prefix + "input_layernorm.weight", {hidden}, Group::kNorm, {.constant = 1});
    add_attention(prefix + "self_attn.", layer);
    layer.norm2 =
        add(prefix + "post_attention_layernorm.weight", {hidden}, Group::kNorm, {.constant = 1});
    if (config.is_dense(l)) {
      add_mlp(prefix + "mlp.", prefix + "mlp.", {0, 1}, config.dense_inner, Group::kDense,
              layer.w13, layer.w2);
    } else {
      add_experts(prefix + "mlp.", layer);
      if (config.adapters) add_adapters(prefix + "mlp.adapters.", layer);
    }
    layers_.push_back(layer);
  }
  norm_ = add("model.norm.weight", {hidden}, Group::kNorm, {.constant = 1});
  head_ = config.tied ? embedding_
                      : add("lm_head.weight", {config.vocabulary, hidden}, Group::kHead,
                            {.deviation = kDeviation});
  for (ParameterTensor& tensor : tensors_) {
    tensor.frozen = std::find(frozen.begin(), frozen.end(), tensor.group) != frozen.end();
  }
  place();
  fill(seed);
}

std::int64_t Parameters::add(const std::string& name, std::vector<std::int64_t> shape, Group group,
                             const Start& start) {
  ParameterTensor tensor{.name = name, .shape = std::move(shape), .group = group};
  tensor.decay = tensor.shape.size() > 1;
  tensor.parts.push_back({.name = name, .shape = tensor.shape});
  tensors_.push_back(std::move(tensor));
  starts_.push_back(start.deviation > 0 ? start.deviation : -start.constant);
  return std::ssize(tensors_) - 1;
}

void Parameters::add_mlp(const std::string& name, const std::string& part, ExpertShare experts,
                         std::int64_t inner, Group group, std::int64_t& w13, std::int64_t& w2) {
  const std::int64_t hidden = config_.hidden;
  const float to_stream = kDeviation / std::sqrt(2.0F * static_cast<float>(config_.layers));
  w13 = add(name + "w13", {experts.count, 2 * inner, hidden}, group, {.deviation = kDeviation});
  w2 = add(name + "w2", {experts.count, hidden, inner}, group, {.deviation = to_stream});
  std::vector<TensorPart>& first = tensors_[static_cast<std::size_t>(w13)].parts;
  std::vector<TensorPart>& second = tensors_[static_cast<std::size_t>(w2)].parts;
  first.clear();
  second.clear();
  const std::int64_t matrix = inner * hidden;
  for (std::int64_t e = 0; e < experts.count; ++e) {
    const std::string prefix = fmt::format(fmt::runtime(part), experts.first + e);
    first.push_back({prefix + "gate_proj.weight", {inner, hidden}, 2 * e * matrix});
    first.push_back({prefix + "up_proj.weight", {inner, hidden}, (2 * e + 1) * matrix});
    second.push_back({prefix + "down_proj.weight", {hidden, inner}, e * matrix});
  }
}

/// q, k and v are one matrix in memory, which one product multiplies with.
void Parameters::add_attention(const std::string& prefix, LayerTensors& layer) {
  const std::int64_t hidden = config_.hidden, dim = config_.head_dim;
  const std::int64_t of_q = config_.heads * dim, of_k = config_.kv_heads * dim;
  const Start normal{.deviation = kDeviation};
  layer.qkv = add(prefix + "q_proj.weight", {of_q, hidden}, Group::kAttention, normal);
  add(prefix + "k_proj.weight", {of_k, hidden}, Group::kAttention, normal);
  add(prefix + "v_proj.weight", {of_k, hidden}, Group::kAttention, normal);
  if (config_.qk_norm != QkNorm::kNone) {
    const bool whole = config_.qk_norm == QkNorm::kWhole;
    layer.q_norm =
        add(prefix + "q_norm.weight", {whole ? of_q : dim}, Group::kNorm, {.constant = 1});
    layer.k_norm =
        add(prefix + "k_norm.weight", {whole ? of_k : dim}, Group::kNorm, {.constant = 1});
  }
  layer.o = add(prefix + "o_proj.weight", {hidden, of_q}, Group::kAttention,
                {.deviation = kDeviation / std::sqrt(2.0F * static_cast<float>(config_.layers))});
}

void Parameters::add_experts(const std::string& prefix, LayerTensors& layer) {
  const std::int64_t hidden = config_.hidden;
  if (const auto soft = soft_moe_config(config_)) {
    layer.phi = add(prefix + "phi.weight", {config_.experts * soft->slots, hidden}, Group::kRouter,
                    {.deviation = kDeviation});
    layer.phi_scale = add(prefix + "phi.scale", {1}, Group::kRouter, {.constant = soft->scale});
    add_mlp(prefix + "experts.", prefix + "experts.{}.", share_, config_.inner, Group::kExperts,
            layer.w13, layer.w2);
    return;
  }
  const RouterConfig router = layer_config(config_).router;
  if (router.has_logits()) {
    const RouterNetwork& network = router.network;
    // Under another name: who does not know the network, or the chain, finds no gate.
    const char* const name = router.is_chain()     ? "gate.iterations.weight"
                             : network.is_linear() ? "gate.weight"
                                                   : "gate.network.out.weight";
    layer.gate = add(prefix + name, {router.gate_rows(), network.features(hidden)}, Group::kRouter,
                     {.deviation = kDeviation});
    if (!network.is_linear()) layer.network = add_network(prefix + "gate.network.", network);
  }
  if (router.noise.kind == RouterNoise::Kind::kLearned) {
    layer.noise_gate =
        add(prefix + "gate.noise_weight", {router.num_logits(), hidden}, Group::kRouter, {});
  }
  add_mlp(prefix + "experts.", prefix + "experts.{}.", share_, config_.inner, Group::kExperts,
          layer.w13, layer.w2);
  for (const std::int64_t index : {layer.w13, layer.w2}) {
    tensors_[static_cast<std::size_t>(index)].sharded = share_.count < config_.experts;
  }
  if (config_.shared_inner > 0) {
    add_mlp(prefix + "shared_expert.", prefix + "shared_expert.", {0, 1}, config_.shared_inner,
            Group::kExperts, layer.shared_w13, layer.shared_w2);
  }
  if (config_.shared_gated) {
    layer.shared_gate = add(prefix + "shared_expert_gate.weight", {1, hidden}, Group::kRouter,
                            {.deviation = kDeviation});
  }
  const auto add_buffer = [&](const std::string& name, std::int64_t size, float start) {
    buffers_.push_back({.name = name,
                        .shape = {size},
                        .group = Group::kRouter,
                        .parts = {{.name = name, .shape = {size}}}});
    buffer_starts_.push_back(start);
    return std::ssize(buffers_) - 1;
  };
  const bool thresholds = std::holds_alternative<ExpertThresholdRouter>(router.kind);
  if (thresholds || config_.bias_rate > 0) {
    layer.bias = add_buffer(prefix + "gate.e_score_correction_bias", config_.experts,
                            thresholds ? -1.0F / static_cast<float>(config_.experts) : 0.0F);
  }
  if (std::holds_alternative<ReluRouter>(router.kind)) {
    layer.l1 = add_buffer(prefix + "gate.l1_coefficient", 1, 1e-8F);
  }
}

/// A and B of all adapters are a tensor each. B is 0, so that nothing is added before a first step;
/// A has the variance of the uniform numbers that LoRA's published code draws, 1 / (3 H).
void Parameters::add_adapters(const std::string& prefix, LayerTensors& layer) {
  const PerftConfig adapters = perft_config(config_);
  const std::int64_t hidden = config_.hidden, rank = adapters.rank, count = adapters.num_adapters;
  const float deviation = 1 / std::sqrt(3.0F * static_cast<float>(hidden));
  const auto add_all = [&](const char* name, std::int64_t rows, std::int64_t cols,
                           const Start& start) {
    const std::int64_t index = add(prefix + name, {count, rows, cols}, Group::kAdapters, start);
    std::vector<TensorPart>& parts = tensors_.back().parts;
    parts.clear();
    for (std::int64_t j = 0; j < count; ++j) {
      parts.push_back(
          {fmt::format("{}{}.{}.weight", prefix, j, name), {rows, cols}, j * rows * cols});
    }
    return index;
  };
  layer.adapters_a = add_all("lora_A", rank, hidden, {.deviation = deviation});
  layer.adapters_b = add_all("lora_B", hidden, rank, {});
  if (adapters.kind == PerftKind::kRouted) {
    layer.adapters_gate = add(prefix + "gate.weight", {adapters.router.num_logits(), hidden},
                              Group::kAdapters, {.deviation = kDeviation});
  }
}

/// Neighbours in memory: LayerModel::router_network is all of them. Biases begin as zeros, the
/// logarithm of a scale as ln 2, as Tutel's.
std::int64_t Parameters::add_network(const std::string& prefix, const RouterNetwork& network) {
  const std::int64_t hidden = config_.hidden, width = network.inner(hidden);
  const Start normal{.deviation = kDeviation};
  const std::int64_t first = add(prefix + "w1.weight", {width, hidden}, Group::kRouter, normal);
  if (network.kind == RouterNetwork::Kind::kCosine) {
    add(prefix + "log_scale", {1}, Group::kRouter, {.constant = std::numbers::ln2_v<float>});
    return first;
  }
  add(prefix + "w1.bias", {width}, Group::kRouter, {});
  if (network.kind == RouterNetwork::Kind::kHadamard) {
    add(prefix + "w2.weight", {hidden, width}, Group::kRouter, normal);
    add(prefix + "w2.bias", {hidden}, Group::kRouter, {});
  }
  return first;
}

void Parameters::place() {
  for (const ParameterTensor& tensor : tensors_) size_ += tensor.size();
  values_.reserve(static_cast<std::size_t>(4 * size_));
  gradients_.reserve(static_cast<std::size_t>(4 * size_));
  auto* value = reinterpret_cast<float*>(values_.data());
  auto* gradient = reinterpret_cast<float*>(gradients_.data());
  std::fill_n(gradient, size_, 0.0F);
  for (ParameterTensor& tensor : tensors_) {
    tensor.value = value;
    tensor.gradient = gradient;
    value += tensor.size();
    gradient += tensor.size();
  }
  std::int64_t all = 0;
  for (const ParameterTensor& buffer : buffers_) all += buffer.size();
  buffer_values_.reserve(static_cast<std::size_t>(4 * std::max<std::int64_t>(all, 1)));
  value = reinterpret_cast<float*>(buffer_values_.data());
  for (ParameterTensor& buffer : buffers_) {
    buffer.value = value;
    value += buffer.size();
  }
}

void Parameters::fill(std::uint64_t seed) {
  for (std::size_t i = 0; i < tensors_.size(); ++i) fill_tensor(i, seed);
  fill_buffers();
}

void Parameters::reset_routers(std::uint64_t seed) {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const bool shared_gate = std::any_of(layers_.begin(), layers_.end(), [&](const auto& layer) {
      return layer.shared_gate == static_cast<std::int64_t>(i);
    });
    if (tensors_[i].group == Group::kRouter && !shared_gate) fill_tensor(i, seed);
  }
  fill_buffers();
}

void Parameters::fill_tensor(std::size_t index, std::uint64_t seed) {
  const ParameterTensor& tensor = tensors_[index];
  const float start = starts_[index];
  if (start <= 0) {
    std::fill_n(tensor.value, tensor.size(), -start);
    return;
  }
  constexpr std::int64_t kPiece = 1 << 16;
  for (const TensorPart& part : tensor.parts) {
    parallel_for(pool_, (part.size() + kPiece - 1) / kPiece, [&](std::int64_t piece, int) {
      fill_normal(part.name, seed, start, tensor.value + part.offset, piece * kPiece,
                  std::min(part.size(), (piece + 1) * kPiece));
    });
  }
}

void Parameters::fill_buffers() {
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    std::fill_n(buffers_[i].value, buffers_[i].size(), buffer_starts_[i]);
  }
}

std::int64_t TensorPart::size() const { return size_of_shape(shape); }
std::int64_t ParameterTensor::size() const { return size_of_shape(shape); }

const char* to_string(Group group) noexcept {
  switch (group) {
    case Group::kEmbedding: return "embedding";
    case Group::kNorm: return "norm";
    case Group::kAttention: return "attention";
    case Group::kRouter: return "router";
    case Group::kExperts: return "experts";
    case Group::kDense: return "dense";
    case Group::kHead: return "head";
    case Group::kAdapters: return "adapters";
  }
  return "?";
}

Group parse_group(std::string_view name) {
  std::string names;
  for (const Group group : kAllGroups) {
    if (name == to_string(group)) return group;
    names += (names.empty() ? "" : ", ") + std::string(to_string(group));
  }
  fail(ErrorCode::kInvalidArgument, "'{}' is no group of parameters, want one of: {}",
       printable(std::string(name)), names);
}

std::optional<NonFinite> find_non_finite(std::span<const ParameterTensor> tensors, bool gradients,
                                         ThreadPool* pool) {
  std::vector<std::int64_t> first(tensors.size(), -1);
  parallel_for(pool, std::ssize(tensors), [&](std::int64_t i, int) {
    const ParameterTensor& tensor = tensors[static_cast<std::size_t>(i)];
    const float* const numbers = gradients ? tensor.gradient : tensor.value;
    for (std::int64_t j = 0; numbers != nullptr && j < tensor.size(); ++j) {
      if (std::isfinite(numbers[j])) continue;
      first[static_cast<std::size_t>(i)] = j;
      return;
    }
  });
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (first[i] < 0) continue;
    const float* const numbers = gradients ? tensors[i].gradient : tensors[i].value;
    for (const TensorPart& part : tensors[i].parts) {
      if (first[i] < part.offset || first[i] >= part.offset + part.size()) continue;
      return NonFinite{
          .tensor = part.name, .index = first[i] - part.offset, .value = numbers[first[i]]};
    }
  }
  return std::nullopt;
}

}  // namespace switchyard::models
