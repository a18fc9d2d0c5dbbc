// AFMoE (Trinity): sigmoid with a selection bias, the chosen renormalised and scaled.
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {.router = "mlp.router.gate.weight",
                               .selection_bias = "mlp.expert_bias",
                               .experts = "mlp.experts.",
                               .shared = "mlp.shared_experts."};
// As released; the class of transformers has none of them and computes just this.
constexpr FixedKey kFixed[] = {{"score_func", R"("sigmoid")"},
                               {"route_norm", "true"},
                               {"n_group", "1"},
                               {"num_expert_groups", "1"},
                               {"num_limited_groups", "1"}};
constexpr ConfigUse kConfig = {.scale = "route_scale",
                               .shared_width = SharedWidth::kCounted,
                               .shared = "num_shared_experts",
                               .moe_layers = MoeLayers::kDenseFirst,
                               .dense_first = "num_dense_layers",
                               .dense_first_absent = 1,
                               .fixed = kFixed};
constexpr ModelNames kModel = {.norm = "pre_mlp_layernorm.weight"};

}  // namespace

constinit const Family kAfmoe = {
    .name = "afmoe",
    .model_types = {"afmoe"},
    .architecture = "AfmoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSigmoid, .renormalize = true}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .model = kModel};

}  // namespace switchyard
