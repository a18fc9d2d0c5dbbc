#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "switchyard/layer.hpp"
#include "switchyard/perft.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard::models {

// What a small language model is: a decoder of L blocks, each attention and then experts (or a
// dense network), both behind an RMS norm and added to the residual stream. docs/models.md has the
// formulas.
//
// Letters besides those of tensor.hpp: B sequences, S positions of each (T = B*S), L layers, V
// vocabulary, N heads, M of them with keys and values of their own, D numbers of a head.

/// What is normalised of queries and keys before they are turned by their positions.
enum class QkNorm : std::uint8_t {
  kNone,
  kHead,   ///< Each head's D numbers, one weight [D] for all heads. Qwen3.
  kWhole,  ///< All heads' numbers together, a weight [N*D] or [M*D]. OLMoE.
};

/// "none", "head", "whole".
[[nodiscard]] const char* to_string(QkNorm norm) noexcept;

/// PERFT adapters (perft.hpp) beside every MoE layer of a model, which is what they learn beside: a
/// run trains them alone, and all else stays as it began. Source: Liu et al. 2024
/// (arXiv:2411.08212).
struct AdapterConfig {
  PerftKind kind = PerftKind::kRouted;
  std::int32_t num_adapters = 4;  ///< N of a layer; embedded: the layer's E; shared: 1.
  std::int32_t top_k = 1;         ///< K of a token, of N; routed, else not looked at.
  bool renormalize = false;       ///< Routed: the K softmax weights are scaled to sum to 1.
  std::int64_t rank = 16;         ///< r.
  float alpha = 32;               ///< What adapters make is added alpha / r times.
  Activation activation = Activation::kIdentity;  ///< Between A and B; identity: LoRA.

  /// Adapters that compute for a token of a layer that gives it `layer_top_k` experts.
  [[nodiscard]] std::int32_t active(std::int32_t layer_top_k) const;
  bool operator==(const AdapterConfig&) const = default;
};

/// How many adapters a layer has where nobody says: embedded the layer's E, shared 1, else 4.
[[nodiscard]] std::int32_t usual_num_adapters(PerftKind kind, std::int32_t experts);

struct ModelConfig {
  std::int64_t vocabulary = 256;  ///< V; 256: bytes.
  std::int64_t hidden = 0;        ///< H.
  std::int32_t layers = 0;        ///< L.
  std::int32_t heads = 0;         ///< N.
  std::int32_t kv_heads = 0;      ///< M; divides N.
  std::int64_t head_dim = 0;      ///< D, even. N*D need not be H.
  std::int64_t sequence = 0;      ///< S: most positions, of training and of a cache.
  bool tied = false;              ///< The head's matrix is the embedding's.
  QkNorm qk_norm = QkNorm::kHead;
  float norm_epsilon = 1e-6F;
  float rope_theta = 10000.0F;

  std::int32_t first_dense = 0;   ///< Layers below have one dense SwiGLU network; L: all.
  std::int64_t dense_inner = 0;   ///< Its inner size; 0 where there is none.
  std::int32_t experts = 0;       ///< E; 0 only where all layers are dense.
  std::int32_t top_k = 1;         ///< K, for routers that are not told otherwise.
  std::int64_t inner = 0;         ///< I of an expert, SwiGLU.
  std::int64_t shared_inner = 0;  ///< Of shared experts together; 0: none.
  bool shared_gated = false;      ///< Times sigmoid(x . shared gate), as Qwen2-MoE.
  /// As parse_router() spells it: "top-k", "top-k:top-k=1", "hash", "expert-choice:group=512", ...
  /// A router of groups that is not told a group takes each sequence as one. Also
  /// "soft-moe:slots=64", soft_moe.hpp: on a CPU, on one rank.
  std::string router = "top-k";
  /// In training: rows an expert takes, see docs/architecture.md. Empty: dropless. Logits and
  /// evaluation never drop.
  std::optional<double> capacity_factor{};
  DropPolicy drop_policy = DropPolicy::kToken;
  /// Of each MoE layer; their sum over layers is added to the loss.
  LossConfig losses{};
  /// Loss-free balancing: SelectionBiasUpdate::rate; 0: none. Of sigmoid and softmax top-k.
  double bias_rate = 0;
  /// Beside every MoE layer; dense layers have none. On a CPU, on one rank.
  std::optional<AdapterConfig> adapters{};

  [[nodiscard]] bool is_dense(std::int32_t layer) const { return layer < first_dense; }
  /// Columns of a layer's queries, keys and values: (N + 2 M) D.
  [[nodiscard]] std::int64_t qkv_columns() const {
    return (std::int64_t{heads} + std::int64_t{2} * kv_heads) * head_dim;
  }
};

/// @throws Error{kInvalidArgument} that names the value which breaks a rule above.
void check(const ModelConfig& config);

/// Whether the router has a logit for each expert and no other, which losses are of.
/// @throws Error{kInvalidArgument}: no such router.
[[nodiscard]] bool takes_losses(const ModelConfig& config);

/// Of a model whose router is soft-moe, which is no MoeLayer's: without a group the tokens of a
/// sequence are one, however many. None: another router.
/// @throws Error{kInvalidArgument}: of the router's spelling.
[[nodiscard]] std::optional<SoftMoeConfig> soft_moe_config(const ModelConfig& config);

/// Experts that a token counts for in operations: top_k, or of Soft-MoE slots by tokens of a group.
[[nodiscard]] double experts_of_token(const ModelConfig& config);

/// What MoeLayer computes of it. @throws Error{kInvalidArgument}: also of the router's spelling;
/// soft-moe is none.
[[nodiscard]] LayerConfig layer_config(const ModelConfig& config);

/// The adapters of one layer, of a model that has some. Embedded ones have the layer's router.
/// @throws Error{kInvalidArgument}: as check(), by the name of the value.
[[nodiscard]] PerftConfig perft_config(const ModelConfig& config);

/// Experts a token by the router, where that is one number, of a chain in all its iterations: what
/// `top_k` should say, by which operations are counted. None of a model without routed layers.
/// @throws Error{kInvalidArgument}: no such router.
[[nodiscard]] std::optional<std::int32_t> taken_top_k(const ModelConfig& config);

/// As `config.json`: the keys of transformers' Qwen3-MoE (qk_norm head) or OLMoE (whole), and what
/// these cannot say under "switchyard". Reads back to the same configuration.
/// `model_type` is "qwen3_moe" or "olmoe" where that family means the same, so that Checkpoint and
/// others read it; else "switchyard".
[[nodiscard]] std::string to_json(const ModelConfig& config);

/// @param text    Of a configuration that to_json() wrote, or one like it by hand.
/// @param source  Its name in errors.
/// @throws Error{kBadFile}: no JSON, a key is missing, unknown under "switchyard", or has a wrong
///         type; {kInvalidArgument}: as check().
[[nodiscard]] ModelConfig parse_model_config(std::string_view text, const std::string& source);

/// A model with the numbers that it is usually trained by.
struct Preset {
  const char* name;        ///< "smoke", "cpu-10min", "s", "m".
  const char* what;        ///< In one line.
  ModelConfig model;       ///< Of bytes but for "m".
  std::int64_t sequences;  ///< B of a step.
  std::int64_t steps;      ///< Of a run.
  std::int64_t warmup;     ///< Of them, with a rising learning rate.
  double learning_rate;    ///< At its peak.
};

[[nodiscard]] std::span<const Preset> presets();
/// @throws Error{kInvalidArgument} with all names.
[[nodiscard]] const Preset& find_preset(std::string_view name);

/// Counts that need no model: for estimates, and for shares of a limit.
struct ModelCounts {
  std::int64_t parameters = 0;  ///< All of them.
  std::int64_t active = 0;      ///< Of them in products for a token: K experts of E, no look-ups.
  std::int64_t routed = 0;      ///< Of them the routed experts', of which ranks have a share each.
  std::int64_t adapters = 0;    ///< Of the parameters those of adapters, which alone learn there.
  /// Useful operations of training a token of a whole sequence: 6*active + 6*L*S*N*D (causal
  /// attention is half the square). Recomputed, padded and dropped rows do not count. With
  /// adapters nobody wants gradients of the weights beside them: 4 of those, 6 of the adapters'.
  double flops_per_token = 0;
  double forward_flops_per_token = 0;  ///< Of them the forward's: 2*active + 2*L*S*N*D.
  /// Of a Model that takes so many tokens a call: values, gradients, packed weights, what a forward
  /// keeps, logits. Without an optimiser's moments (8 bytes a parameter), and without what buffers
  /// are rounded up by: each one of 2 MiB and more to whole MiB, some dozen a layer.
  double bytes(std::int64_t tokens) const { return fixed_bytes + token_bytes * double(tokens); }
  double fixed_bytes = 0;
  double routed_bytes = 0;  ///< Of fixed_bytes the routed experts'.
  double token_bytes = 0;
};

[[nodiscard]] ModelCounts count(const ModelConfig& config);

}  // namespace switchyard::models
