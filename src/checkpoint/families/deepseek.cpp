// DeepSeek-V2 (softmax, groups by their best) and DeepSeek-V3 (sigmoid with a selection bias,
// groups by their two best), the latter also as Kimi-K2, GLM-4.5, dots.llm1, GLM-4.7-Flash, Solar
// Open and MiMo-V2-Flash use it.
#include "checkpoint/families/families.hpp"

#include <nlohmann/json.hpp>
#include "checkpoint/files/file_error.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNamesV2 = {
    .router = "mlp.gate.weight", .experts = "mlp.experts.", .shared = "mlp.shared_experts."};
constexpr BlockNames kNamesV3 = {.router = "mlp.gate.weight",
                                 .selection_bias = "mlp.gate.e_score_correction_bias",
                                 .experts = "mlp.experts.",
                                 .shared = "mlp.shared_experts."};

constexpr FixedKey kFixedV2[] = {{"scoring_func", R"("softmax")", true}, {"mlp_bias", "false"}};
constexpr FixedKey kFixedV3[] = {{"scoring_func", R"("sigmoid")", true},
                                 {"topk_method", R"("noaux_tc")", true},
                                 {"mlp_bias", "false"}};

constexpr ConfigUse kConfigV2 = {.experts = "n_routed_experts",
                                 .shared_width = SharedWidth::kCounted,
                                 .shared = "n_shared_experts",
                                 .moe_layers = MoeLayers::kDenseFirst,
                                 .dense_first = "first_k_dense_replace",
                                 .fixed = kFixedV2};
constexpr ConfigUse kConfigV3 = {.experts = "n_routed_experts",
                                 .renormalize = "norm_topk_prob",
                                 .renormalize_absent = true,
                                 .scale = "routed_scaling_factor",
                                 .groups = true,
                                 .shared_width = SharedWidth::kCounted,
                                 .shared = "n_shared_experts",
                                 .moe_layers = MoeLayers::kDenseFirst,
                                 .dense_first = "first_k_dense_replace",
                                 .fixed = kFixedV3};
constexpr ConfigUse kConfigTyped = {.experts = "n_routed_experts",
                                    .renormalize = "norm_topk_prob",
                                    .renormalize_absent = true,
                                    .scale = "routed_scaling_factor",
                                    .groups = true,
                                    .shared_width = SharedWidth::kCounted,
                                    .shared = "n_shared_experts",
                                    .moe_layers = MoeLayers::kTyped,
                                    .dense_first_absent = 1,
                                    .fixed = kFixedV3};
constexpr FixedKey kFixedSolar[] = {{"scoring_func", R"("sigmoid")"},
                                    {"topk_method", R"("noaux_tc")"},
                                    {"first_k_dense_replace", "0"}};
constexpr ConfigUse kConfigSolar = {.experts = "n_routed_experts",
                                    .renormalize = "norm_topk_prob",
                                    .renormalize_absent = true,
                                    .scale = "routed_scaling_factor",
                                    .groups = true,
                                    .shared_width = SharedWidth::kCounted,
                                    .shared = "n_shared_experts",
                                    .fixed = kFixedSolar};
// Its class has no shared experts, whatever n_shared_experts says.
constexpr ConfigUse kConfigMimo = {.experts = "n_routed_experts",
                                   .renormalize = "norm_topk_prob",
                                   .renormalize_absent = true,
                                   .scale = "routed_scaling_factor",
                                   .groups = true,
                                   .moe_layers = MoeLayers::kTyped,
                                   .dense_first_absent = 1,
                                   .fixed = kFixedV3};

constexpr LayerConfig kLayerV3 = {
    .router = {.kind = TopKRouter{.score = Score::kSigmoid,
                                  .renormalize = true,
                                  .group_score = GroupScore::kTop2Sum}}};

// V2's own gate (modeling_deepseek.py of its release) scales only what it does not renormalise, and
// never renormalises one expert. The class in transformers ignores norm_topk_prob and always
// scales, others do both; all agree on the public checkpoints, whose norm_topk_prob is false.
void read_v2(const ConfigReader& json, ModelConfig& config) {
  TopKRouter& router = config.layer.router.as_top_k();
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

void write_v2(const CheckpointRecipe& recipe, Json& json) {
  const TopKRouter& router = recipe.layer.router.as_top_k();
  json["moe_layer_freq"] = 1;
  json["norm_topk_prob"] = router.renormalize;
  json["routed_scaling_factor"] = shortest(router.scale);
  json["n_group"] = router.groups;
  json["topk_group"] = router.top_groups;
  json["topk_method"] = router.groups > 1 ? "group_limited_greedy" : "greedy";
}

void write_v3(const CheckpointRecipe& /*recipe*/, Json& json) { json["moe_layer_freq"] = 1; }

}  // namespace

constinit const Family kDeepseekV2 = {
    .name = "deepseek-v2",
    .model_types = {"deepseek_v2"},
    .architecture = "DeepseekV2ForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax,
                                            .renormalize = false,
                                            .group_score = GroupScore::kMax}}},
    .config = kConfigV2,
    .names = kNamesV2,
    .read_more = read_v2,
    .write_more = write_v2};

constinit const Family kDeepseekV3 = {
    .name = "deepseek-v3",
    .model_types = {"deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe"},
    .architecture = "DeepseekV3ForCausalLM",
    .layer = kLayerV3,
    .config = kConfigV3,
    .names = kNamesV3,
    .has_fp8 = true,
    .write_more = write_v3};

constinit const Family kDots1 = {.name = "dots1",
                                 .model_types = {"dots1"},
                                 .architecture = "Dots1ForCausalLM",
                                 .layer = kLayerV3,
                                 .config = kConfigV3,
                                 .names = kNamesV3};

constinit const Family kGlm4MoeLite = {.name = "glm4-moe-lite",
                                       .model_types = {"glm4_moe_lite"},
                                       .architecture = "Glm4MoeLiteForCausalLM",
                                       .layer = kLayerV3,
                                       .rms_norm_eps = 1e-5F,
                                       .config = kConfigTyped,
                                       .names = kNamesV3};

constinit const Family kSolarOpen = {.name = "solar-open",
                                     .model_types = {"solar_open"},
                                     .architecture = "SolarOpenForCausalLM",
                                     .layer = kLayerV3,
                                     .rms_norm_eps = 1e-5F,
                                     .config = kConfigSolar,
                                     .names = kNamesV3};

constinit const Family kMimoV2Flash = {.name = "mimo-v2-flash",
                                       .model_types = {"mimo_v2_flash"},
                                       .architecture = "MiMoV2FlashForCausalLM",
                                       .layer = kLayerV3,
                                       .rms_norm_eps = 1e-5F,
                                       .config = kConfigMimo,
                                       .names = kNamesV3};

}  // namespace switchyard
