// LongCat-Flash: softmax over all experts, chosen with a selection bias, scaled and not
// renormalised; the last of them ("zero experts") return their input.
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {.router = "mlp.router.classifier.weight",
                               .selection_bias = "mlp.router.e_score_correction_bias",
                               .experts = "mlp.experts."};
constexpr FixedKey kFixed[] = {{"zero_expert_type", R"("identity")", true},
                               {"router_bias", "false"},
                               {"norm_topk_prob", "false"}};
// A layer has two attentions and two dense networks around its block: num_hidden_layers, where it
// is given, is twice num_layers.
constexpr ConfigUse kConfig = {.layers = "num_layers",
                               .experts = "n_routed_experts",
                               .top_k = "moe_topk",
                               .inner = "expert_ffn_hidden_size",
                               .identity = "zero_expert_num",
                               .identity_absent = 256,
                               .scale = "routed_scaling_factor",
                               .fixed = kFixed};
constexpr ModelNames kModel = {.norm = "post_attention_layernorm.0.weight"};

}  // namespace

constinit const Family kLongcatFlash = {
    .name = "longcat-flash",
    .model_types = {"longcat_flash"},
    .architecture = "LongcatFlashForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = false}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .model = kModel};

}  // namespace switchyard
