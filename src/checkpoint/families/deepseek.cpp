// DeepSeek-V2 (softmax, groups by their best) and DeepSeek-V3 (sigmoid with a selection bias,
// groups by their two best); the latter also as Kimi-K2 and GLM-4.5 use it.
#include <fmt/core.h>

#include "checkpoint/families/family.hpp"
#include "checkpoint/files/file_error.hpp"

namespace switchyard {
namespace {

constexpr PerExpertNames kNamesV2 = {.router = "mlp.gate.weight",
                                     .experts = "mlp.experts.",
                                     .parts = {"gate_proj", "up_proj", "down_proj"},
                                     .shared = "mlp.shared_experts."};
constexpr PerExpertNames kNamesV3 = {.router = "mlp.gate.weight",
                                     .selection_bias = "mlp.gate.e_score_correction_bias",
                                     .experts = "mlp.experts.",
                                     .parts = {"gate_proj", "up_proj", "down_proj"},
                                     .shared = "mlp.shared_experts."};

void read_groups(const ConfigReader& json, RouterConfig& config) {
  TopKRouter& router = config.as_top_k();
  router.groups = static_cast<std::int32_t>(json.whole_or("n_group", 1, config.num_experts, 1));
  router.top_groups =
      static_cast<std::int32_t>(json.whole_or("topk_group", 1, router.groups, router.groups));
  require_file(config.num_experts % router.groups == 0, json.file(),
               "n_group={} does not divide n_routed_experts={}", router.groups, config.num_experts);
  const std::int32_t candidates = config.num_experts / router.groups * router.top_groups;
  require_file(router.top_k <= candidates, json.file(),
               "num_experts_per_tok={} exceeds the {} experts of topk_group={} groups",
               router.top_k, candidates, router.top_groups);
}

void require_text(const ConfigReader& json, const char* key, const char* expected) {
  const std::string text = json.text_or(key, expected);
  require_file(text == expected, json.file(), "{}='{}' is not '{}'", key, text, expected);
}

void read_common(const ConfigReader& json, ModelConfig& config) {
  read_experts(json, "n_routed_experts", "moe_intermediate_size", config);
  const std::int64_t first = json.whole_or("first_k_dense_replace", 0, config.num_layers, 0);
  const std::int64_t step = json.whole_or("moe_layer_freq", 1, INT32_MAX, 1);
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (layer >= first && layer % step == 0) config.moe_layers.push_back(layer);
  }
  const std::int64_t shared = json.whole_or("n_shared_experts", 0, 1024, 0);
  set_shared(config.layer, shared * config.layer.experts.inner);
}

void read_v2(const ConfigReader& json, ModelConfig& config) {
  read_common(json, config);
  require_text(json, "scoring_func", "softmax");
  TopKRouter& router = config.layer.router.as_top_k();
  // V2's own gate scales only what it does not renormalise. Other implementations scale both, or
  // never renormalise; all agree on the public checkpoints, whose norm_topk_prob is false.
  router.renormalize = json.flag_or("norm_topk_prob", false) && router.top_k > 1;
  router.scale = router.renormalize ? 1.0F : json.real_or("routed_scaling_factor", 1.0F);
  const std::string method = json.text_or("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    read_groups(json, config.layer.router);
  } else {
    require_file(method == "greedy", json.file(),
                 "topk_method='{}' is not greedy or group_limited_greedy", method);
  }
}

void read_v3(const ConfigReader& json, ModelConfig& config) {
  read_common(json, config);
  require_text(json, "scoring_func", "sigmoid");
  require_text(json, "topk_method", "noaux_tc");
  TopKRouter& router = config.layer.router.as_top_k();
  router.renormalize = json.flag_or("norm_topk_prob", true);
  router.scale = json.real_or("routed_scaling_factor", 1.0F);
  read_groups(json, config.layer.router);
}

void write_common(const CheckpointRecipe& recipe, Json& json) {
  const TopKRouter& router = recipe.layer.router.as_top_k();
  json["n_routed_experts"] = recipe.layer.router.num_experts;
  json["n_shared_experts"] = recipe.shared_experts;
  json["moe_intermediate_size"] = recipe.layer.experts.inner;
  // As the public ones, the first layer is dense; a model of one layer would have nothing to show.
  json["first_k_dense_replace"] = recipe.num_layers > 1 ? 1 : 0;
  json["intermediate_size"] = recipe.layer.experts.inner;
  json["moe_layer_freq"] = 1;
  json["norm_topk_prob"] = router.renormalize;
  // The shortest text of the float, not its expansion as a double.
  json["routed_scaling_factor"] = Json::parse(fmt::format("{}", router.scale));
  json["n_group"] = router.groups;
  json["topk_group"] = router.top_groups;
}

void write_v2(const CheckpointRecipe& recipe, Json& json) {
  write_common(recipe, json);
  json["scoring_func"] = "softmax";
  json["topk_method"] =
      recipe.layer.router.as_top_k().groups > 1 ? "group_limited_greedy" : "greedy";
}

void write_v3(const CheckpointRecipe& recipe, Json& json) {
  write_common(recipe, json);
  json["scoring_func"] = "sigmoid";
  json["topk_method"] = "noaux_tc";
  if (recipe.dtype == DType::kF8E4M3) {
    json["quantization_config"] = {
        {"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {128, 128}}};
  }
}

}  // namespace

const Family kDeepseekV2 = {
    .name = "deepseek-v2",
    .model_types = {"deepseek_v2"},
    .architecture = "DeepseekV2ForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax,
                                            .renormalize = false,
                                            .group_score = GroupScore::kMax}}},
    .rms_norm_eps = 1e-6F,
    .names = &kNamesV2,
    .read_config = read_v2,
    .write_config = write_v2,
    .load = load_per_expert,
    .list = list_per_expert};

const Family kDeepseekV3 = {
    .name = "deepseek-v3",
    .model_types = {"deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe"},
    .architecture = "DeepseekV3ForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSigmoid,
                                            .renormalize = true,
                                            .group_score = GroupScore::kTop2Sum}}},
    .rms_norm_eps = 1e-6F,
    .names = &kNamesV3,
    .read_config = read_v3,
    .write_config = write_v3,
    .load = load_per_expert,
    .list = list_per_expert};

}  // namespace switchyard
