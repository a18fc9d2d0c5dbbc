#pragma once

// What a family of models means: its configuration keys, its tensors' names, its routing rule.
// One row of the table per family; adding one is adding a file and a row.
// Source of keys and names: the families' public configurations and modelling code
// (huggingface/transformers, and the remote code of DeepSeek-V2 and DeepSeek-V3).

#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config_reader.hpp"
#include "checkpoint/made/made_tensor.hpp"
#include "checkpoint/tensor_set.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

struct Family;

/// config.json in one form for all families.
struct ModelConfig {
  const Family* family = nullptr;
  LayerConfig layer;
  std::int32_t num_layers = 0;
  std::vector<std::int32_t> moe_layers;  ///< Ascending.
  std::int64_t vocabulary = 0;
  float rms_norm_eps = 1e-6F;
};

/// Tensors' names after "model.layers.N." where each expert's matrix is a tensor of its own.
struct PerExpertNames {
  const char* router;
  const char* selection_bias = nullptr;  ///< Null: the family has none.
  const char* experts;                   ///< Before the expert's number.
  std::array<const char*, 3> parts;      ///< After it, in the order of ExpertPart.
  const char* shared = nullptr;          ///< Before the part's name; null: no shared expert.
  const char* shared_gate = nullptr;     ///< [1, H]; null: the shared expert has no gate.
};

struct Family {
  std::string_view name;
  std::array<std::string_view, 4> model_types;  ///< Of config.json; the first is written.
  std::string_view architecture;
  /// What the family fixes, and the defaults of what it leaves open; sizes are 0.
  LayerConfig layer;
  float rms_norm_eps = 1e-6F;
  const PerExpertNames* names = nullptr;
  /// Fill in layer and moe_layers; the sizes common to all families are there already.
  void (*read_config)(const ConfigReader& json, ModelConfig& config);
  /// Add the keys of the family to those common to all.
  void (*write_config)(const CheckpointRecipe& recipe, Json& json);
  LayerModel (*load)(const std::shared_ptr<const TensorSet>& tensors, const ModelConfig& config,
                     const std::string& layer_prefix);
  /// The MoE block's tensors of a layer, to be made up.
  std::vector<MadeTensor> (*list)(const CheckpointRecipe& recipe, const std::string& layer_prefix);
};

extern const Family kMixtral;
extern const Family kQwen3Moe;
extern const Family kQwen2Moe;
extern const Family kOlmoe;
extern const Family kDeepseekV2;
extern const Family kDeepseekV3;
extern const Family kGptOss;

[[nodiscard]] std::span<const Family* const> families();
/// @throws Error{kInvalidArgument} that lists the names.
[[nodiscard]] const Family& find_family(std::string_view name);

/// @throws Error{kBadFile}: a key is missing or out of range, or the family is unknown.
[[nodiscard]] ModelConfig read_config(const Json& json, const std::string& file);
/// The inverse, for a recipe.
[[nodiscard]] Json write_config(const CheckpointRecipe& recipe);

/// "model.layers.N."
[[nodiscard]] std::string layer_prefix(std::int32_t layer);

// What several families share.
[[nodiscard]] LayerModel load_per_expert(const std::shared_ptr<const TensorSet>& tensors,
                                         const ModelConfig& config,
                                         const std::string& layer_prefix);
[[nodiscard]] std::vector<MadeTensor> list_per_expert(const CheckpointRecipe& recipe,
                                                      const std::string& layer_prefix);
/// Sizes of the routed experts by the family's keys.
void read_experts(const ConfigReader& json, const char* experts_key, const char* inner_key,
                  ModelConfig& config);
/// One shared expert of that width; 0: none.
void set_shared(LayerConfig& layer, std::int64_t inner);
void every_layer_is_moe(ModelConfig& config);

// Larger sizes than any model's, small enough that no product of two overflows.
inline constexpr std::int64_t kMaxExperts = 1 << 16;
inline constexpr std::int64_t kMaxWidth = 1 << 26;

}  // namespace switchyard
