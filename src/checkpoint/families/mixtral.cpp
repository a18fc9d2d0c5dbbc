// Mixtral: softmax over all experts, the chosen renormalised.
#include "checkpoint/families/family.hpp"

namespace switchyard {
namespace {

constexpr PerExpertNames kNames = {.router = "block_sparse_moe.gate.weight",
                                   .experts = "block_sparse_moe.experts.",
                                   .parts = {"w1", "w3", "w2"}};

void read(const ConfigReader& json, ModelConfig& config) {
  read_experts(json, "num_local_experts", "intermediate_size", config);
  every_layer_is_moe(config);
}

void write(const CheckpointRecipe& recipe, Json& json) {
  json["num_local_experts"] = recipe.layer.experts.num_experts;
  json["intermediate_size"] = recipe.layer.experts.inner;
}

}  // namespace

const Family kMixtral = {
    .name = "mixtral",
    .model_types = {"mixtral"},
    .architecture = "MixtralForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .rms_norm_eps = 1e-5F,
    .names = &kNames,
    .read_config = read,
    .write_config = write,
    .load = load_per_expert,
    .list = list_per_expert};

}  // namespace switchyard
