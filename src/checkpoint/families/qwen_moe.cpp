// Qwen3-MoE and OLMoE: softmax over all experts; `norm_topk_prob` says whether the chosen are
// renormalised. Qwen2-MoE adds a shared expert with a sigmoid gate of its own.
#include <algorithm>

#include "checkpoint/families/family.hpp"

namespace switchyard {
namespace {

constexpr PerExpertNames kNames = {.router = "mlp.gate.weight",
                                   .experts = "mlp.experts.",
                                   .parts = {"gate_proj", "up_proj", "down_proj"}};
constexpr PerExpertNames kSharedNames = {.router = "mlp.gate.weight",
                                         .experts = "mlp.experts.",
                                         .parts = {"gate_proj", "up_proj", "down_proj"},
                                         .shared = "mlp.shared_expert.",
                                         .shared_gate = "mlp.shared_expert_gate.weight"};

/// A layer is dense if it is listed in mlp_only_layers, or not each decoder_sparse_step-th.
void read_moe_layers(const ConfigReader& json, ModelConfig& config) {
  const std::int64_t step = json.whole_or("decoder_sparse_step", 1, INT32_MAX, 1);
  const std::vector<std::int64_t> dense = json.list("mlp_only_layers");
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    if ((layer + 1) % step == 0 && std::find(dense.begin(), dense.end(), layer) == dense.end()) {
      config.moe_layers.push_back(layer);
    }
  }
}

void read_qwen3(const ConfigReader& json, ModelConfig& config) {
  read_experts(json, "num_experts", "moe_intermediate_size", config);
  config.layer.router.as_top_k().renormalize = json.flag_or("norm_topk_prob", false);
  read_moe_layers(json, config);
}

void read_qwen2(const ConfigReader& json, ModelConfig& config) {
  read_qwen3(json, config);
  set_shared(config.layer, json.whole("shared_expert_intermediate_size", 1, kMaxWidth));
}

void write_qwen3(const CheckpointRecipe& recipe, Json& json) {
  json["num_experts"] = recipe.layer.experts.num_experts;
  json["moe_intermediate_size"] = recipe.layer.experts.inner;
  json["norm_topk_prob"] = recipe.layer.router.as_top_k().renormalize;
  json["decoder_sparse_step"] = 1;
  json["mlp_only_layers"] = Json::array();
}

void write_qwen2(const CheckpointRecipe& recipe, Json& json) {
  write_qwen3(recipe, json);
  json["shared_expert_intermediate_size"] = recipe.layer.shared.inner;
}

void read_olmoe(const ConfigReader& json, ModelConfig& config) {
  read_experts(json, "num_experts", "intermediate_size", config);
  config.layer.router.as_top_k().renormalize = json.flag_or("norm_topk_prob", false);
  every_layer_is_moe(config);
}

void write_olmoe(const CheckpointRecipe& recipe, Json& json) {
  json["num_experts"] = recipe.layer.experts.num_experts;
  json["intermediate_size"] = recipe.layer.experts.inner;
  json["norm_topk_prob"] = recipe.layer.router.as_top_k().renormalize;
}

}  // namespace

const Family kQwen3Moe = {
    .name = "qwen3-moe",
    .model_types = {"qwen3_moe"},
    .architecture = "Qwen3MoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .rms_norm_eps = 1e-6F,
    .names = &kNames,
    .read_config = read_qwen3,
    .write_config = write_qwen3,
    .load = load_per_expert,
    .list = list_per_expert};

const Family kQwen2Moe = {
    .name = "qwen2-moe",
    .model_types = {"qwen2_moe"},
    .architecture = "Qwen2MoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = false}},
              .shared_gated = true},
    .rms_norm_eps = 1e-6F,
    .names = &kSharedNames,
    .read_config = read_qwen2,
    .write_config = write_qwen2,
    .load = load_per_expert,
    .list = list_per_expert};

const Family kOlmoe = {
    .name = "olmoe",
    .model_types = {"olmoe"},
    .architecture = "OlmoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = false}}},
    .rms_norm_eps = 1e-5F,
    .names = &kNames,
    .read_config = read_olmoe,
    .write_config = write_olmoe,
    .load = load_per_expert,
    .list = list_per_expert};

}  // namespace switchyard
