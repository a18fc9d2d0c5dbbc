#pragma once

// What a whole model of a family is: its MoE blocks as src/checkpoint/families/ reads them, and
// what stands around these. Source of keys and meanings: the families' configuration and modelling
// classes in transformers 5.23.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/families/family.hpp"
#include "models/released/rope.hpp"
#include "switchyard/models/config.hpp"

namespace switchyard::models {

/// Keys and values from one small vector a token (DeepSeek-V2, arXiv:2405.04434, section 2.1).
struct LatentConfig {
  std::int64_t query_rank = 0;  ///< 0: queries are made of the stream itself.
  std::int64_t rank = 0;        ///< Of keys and values; 0: there is no such attention.
  std::int64_t plain_dim = 0;   ///< Numbers of a head's query and key that positions do not turn.
  std::int64_t rope_dim = 0;    ///< And that they do; those of a key are the same for all heads.
};

struct ReleasedConfig {
  switchyard::ModelConfig blocks{};
  std::int64_t positions = 0;
  std::int64_t heads = 0, kv_heads = 0;
  std::int64_t query_dim = 0;  ///< Numbers of a head's query and key,
  std::int64_t value_dim = 0;  ///< and of its value.
  bool tied = false;           ///< The head's matrix is the embedding's.
  float norm_epsilon = 1e-6F;
  QkNorm qk_norm = QkNorm::kNone;
  bool bias = false;  ///< Of the projections to queries, keys and values (latent: of the first),
  bool out_bias = false;  ///< and of the one back.
  float clip = 0;         ///< Queries, keys and values are kept within +-clip; 0: as they are.
  bool sinks = false;     ///< A logit of each head that takes its share and has no value.
  std::vector<std::int64_t> windows{};  ///< [L] of each layer; 0: all positions.
  RopeConfig rope{};
  float score_scale = 0;
  LatentConfig latent{};
  std::int64_t dense_inner = 0;  ///< Of layers that are not MoE.

  [[nodiscard]] std::int64_t hidden() const { return blocks.layer.experts.hidden; }
  /// Numbers of a head as attention has it: queries, keys and values in the same room.
  [[nodiscard]] std::int64_t head_dim() const { return std::max(query_dim, value_dim); }
};

/// @throws Error{kBadFile} that names the key: one is missing or out of range, says what is not
///         computed here, or the family is none whose whole models are.
[[nodiscard]] ReleasedConfig read_released_config(const Json& json, const std::string& file);

/// "olmoe, qwen3_moe, ...": the model types that are read.
[[nodiscard]] std::string released_model_types();

}  // namespace switchyard::models
