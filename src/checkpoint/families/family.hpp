#pragma once

// What a family of models means: its configuration keys, its tensors' names, its routing rule. One
// row of the table per family, nearly all of it data; docs/checkpoints.md says how to add one.
// Source of keys and names: the families' public configurations and modelling code
// (huggingface/transformers 5.23 and its conversion_mapping, and the remote code of DeepSeek-V2 and
// DeepSeek-V3).

#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config_reader.hpp"
#include "checkpoint/made/made_tensor.hpp"
#include "checkpoint/sources/expert_source.hpp"
#include "checkpoint/tensor_set.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

struct Family;

/// config.json in one form for all families.
struct ModelConfig {
  const Family* family = nullptr;
  LayerConfig layer;
  bool selection_bias = false;  ///< The router has one.
  std::string stem;             ///< Of the text model's tensors: "model.".
  bool nested = false;          ///< It is a part of a model for text and other things.
  std::int32_t num_layers = 0;
  std::vector<std::int32_t> moe_layers;  ///< Ascending.
  std::int64_t vocabulary = 0;
  float rms_norm_eps = 1e-6F;
  GptqZeros gptq_zeros = GptqZeros::kLessOne;  ///< Of experts that are stored so.
};

/// Which layers are Mixture-of-Experts.
enum class MoeLayers : std::uint8_t {
  kAll,
  kEveryNth,    ///< By decoder_sparse_step, but for mlp_only_layers.
  kDenseFirst,  ///< Not the first ones; by mlp_layer_types or a list moe_layer_freq, where given.
  kTyped,       ///< As kDenseFirst; mlp_layer_types is what is written.
  kListed,      ///< By moe_layers; where that is absent each interleave_moe_layer_step-th.
  kRange,       ///< From moe_layer_start_index to moe_layer_end_index, each moe_layer_interval-th.
};

/// How wide the shared expert is.
enum class SharedWidth : std::uint8_t {
  kNone,
  kCounted,  ///< A number of experts' widths, by ConfigUse::shared.
  kOwn,      ///< As ConfigUse::shared says.
  kInner,    ///< An expert's.
};

/// A key that would change what a block computes, of which one value is computed.
struct FixedKey {
  std::string_view key;
  std::string_view value;  ///< As JSON.
  bool written = false;    ///< make_checkpoint() writes it.
};

/// The keys of a family, by the name that make_checkpoint() writes; all other names of
/// config_keys.hpp are read too. Null: the family has no such key.
struct ConfigUse {
  const char* section = nullptr;  ///< The object that says what a block is; null: the whole.
  const char* layers = "num_hidden_layers";
  const char* hidden = "hidden_size";
  const char* experts = "num_experts";
  const char* top_k = "num_experts_per_tok";
  const char* inner = "moe_intermediate_size";
  const char* identity = nullptr;  ///< Experts behind the others that return their input.
  std::int32_t identity_absent = 0;
  const char* renormalize = nullptr;
  bool renormalize_absent = false;  ///< Its value where the key is absent.
  const char* scale = nullptr;      ///< Absent: 1.
  bool groups = false;              ///< n_group, topk_group.
  SharedWidth shared_width = SharedWidth::kNone;
  const char* shared = nullptr;
  MoeLayers moe_layers = MoeLayers::kAll;
  const char* dense_first = nullptr;  ///< Number of layers.
  std::int32_t dense_first_absent = 0;
  std::span<const FixedKey> fixed{};
};

/// Where all experts of a part lie in one tensor: names after BlockNames::experts (of the shared
/// expert: after BlockNames::shared).
struct StackNames {
  const char* gate = "gate_up_proj";  ///< Gate and up together where `up` is null.
  const char* up = nullptr;
  const char* down = "down_proj";
  StackedForm form = StackedForm::kByShape;  ///< Made as kRows.
  StackedForm down_form = StackedForm::kByShape;
  bool flat = false;                   ///< Made in two dimensions.
  bool interleaved = false;            ///< Gate and up rows take turns.
  const char* gate_up_bias = nullptr;  ///< [E, 2I].
  const char* down_bias = nullptr;     ///< [E, H]; without gate_up_bias [H], for all experts.
  bool mxfp4 = false;  ///< Or, as released, blocks and scales (make_mxfp4_source); made in bf16 so.
};

/// Tensors' names after a layer's prefix. Null: the family has none.
struct BlockNames {
  const char* router;                    ///< [E, H].
  const char* router_bias = nullptr;     ///< [E].
  const char* selection_bias = nullptr;  ///< [E] or [1, E].
  const char* experts;                   ///< Before an expert's number, or the name of a stack.
  std::array<const char*, 3> parts = {"gate_proj", "up_proj", "down_proj"};  ///< After the number.
  /// Null: each matrix is a tensor of its own; where there is none of these, stacks are read too.
  const StackNames* stack = nullptr;
  const char* shared = nullptr;              ///< Before a part's name, or that of a stack.
  const StackNames* shared_stack = nullptr;  ///< Null: each matrix is a tensor of its own.
  const char* shared_gate = nullptr;         ///< [1, H].
};

/// Tensors' names around the layers, after ModelConfig::stem.
struct ModelNames {
  const char* stem = "model.";
  const char* layers = "layers.";  ///< Before a layer's number.
  const char* embedding = "embed_tokens.weight";
  /// RMS norm right before the block; null: there is none, or another kind.
  const char* norm = "post_attention_layernorm.weight";
  float norm_offset = 0.0F;  ///< Added to its weights.
};

struct Family {
  std::string_view name;
  std::array<std::string_view, 4> model_types;  ///< Of config.json; the first is written.
  std::string_view architecture;
  /// What the family fixes, and the defaults of what it leaves open; sizes are 0.
  LayerConfig layer;
  float rms_norm_eps = 1e-6F;
  ConfigUse config{};
  BlockNames names;
  /// What transformers 5 calls its modules, where that is not as released: so are they saved with
  /// save_original_format=False.
  const BlockNames* module_names = nullptr;
  ModelNames model{};
  bool has_fp8 = false;  ///< Released with experts in e4m3, a scale for each 128 x 128 values, too.
  /// What the tables above cannot say; null: nothing. After everything else.
  void (*read_more)(const ConfigReader& json, ModelConfig& config) = nullptr;
  void (*write_more)(const CheckpointRecipe& recipe, Json& json) = nullptr;
};

[[nodiscard]] std::span<const Family* const> families();
/// Their names, as options list them: "mixtral|minimax|...".
[[nodiscard]] const std::string& family_names();
/// @throws Error{kInvalidArgument} that lists the names.
[[nodiscard]] const Family& find_family(std::string_view name);

/// @throws Error{kBadFile}: a key is missing or out of range, says what is not computed here, or
/// the
///         family is unknown.
[[nodiscard]] ModelConfig read_config(const Json& json, const std::string& file);
/// The inverse, for a recipe.
[[nodiscard]] Json write_config(const CheckpointRecipe& recipe);

/// "model.layers.N."
[[nodiscard]] std::string layer_prefix(const ModelConfig& config, std::int32_t layer);

/// The block of a layer. Sources keep the tensors alive.
/// @throws Error{kBadFile}: a tensor is missing, or has another shape or dtype.
[[nodiscard]] LayerModel load_layer(const std::shared_ptr<const TensorSet>& tensors,
                                    const ModelConfig& config, std::int32_t layer);
/// The tensors of a layer's block, to be made up.
[[nodiscard]] std::vector<MadeTensor> list_layer(const CheckpointRecipe& recipe,
                                                 const ModelConfig& config, std::int32_t layer);

/// Values of a row that share a scale in weights of four bits of a recipe: the most of 128, 64 and
/// 32 that divide its sizes.
/// @throws Error{kInvalidArgument}: none does.
[[nodiscard]] std::int64_t made_group(const CheckpointRecipe& recipe);

/// One shared expert of that width; 0: none.
void set_shared(LayerConfig& layer, std::int64_t inner);
/// groups and top_groups by n_group and topk_group.
void read_groups(const ConfigReader& json, RouterConfig& config);
/// The shortest text of a float, not its expansion as a double.
[[nodiscard]] Json shortest(float value);

// Larger sizes than any model's, small enough that no product of two overflows.
inline constexpr std::int64_t kMaxExperts = 1 << 16;
inline constexpr std::int64_t kMaxWidth = 1 << 26;

}  // namespace switchyard
