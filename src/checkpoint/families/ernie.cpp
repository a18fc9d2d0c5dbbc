// ERNIE 4.5: softmax over all experts, chosen with a selection bias and renormalised.
#include "checkpoint/families/families.hpp"
#include "checkpoint/files/file_error.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {.router = "mlp.gate.weight",
                               .selection_bias = "mlp.moe_statics.e_score_correction_bias",
                               .experts = "mlp.experts.",
                               .shared = "mlp.shared_experts."};
constexpr BlockNames kModuleNames = {
    .router = "mlp.gate.weight",
    .selection_bias = "mlp.gate.moe_statics.e_score_correction_bias",
    .experts = "mlp.experts.",
    .shared = "mlp.shared_experts."};
constexpr FixedKey kFixed[] = {{"use_bias", "false", true}};
constexpr ConfigUse kConfig = {.experts = "moe_num_experts",
                               .top_k = "moe_k",
                               .shared_width = SharedWidth::kCounted,
                               .shared = "moe_num_shared_experts",
                               .moe_layers = MoeLayers::kRange,
                               .fixed = kFixed};

/// The K best of E probabilities sum to K / E at least, so a smaller floor under the sum is never
/// reached.
void read(const ConfigReader& json, ModelConfig& config) {
  const RouterConfig& router = config.layer.router;
  const float floor = json.real_or("moe_norm_min", 1e-12F);
  require_file(floor * static_cast<float>(router.num_experts) <= static_cast<float>(router.top_k()),
               json.file(),
               "moe_norm_min={}: only floors that are never reached are supported here", floor);
}

}  // namespace

constinit const Family kErnie45Moe = {
    .name = "ernie4.5-moe",
    .model_types = {"ernie4_5_moe"},
    .architecture = "Ernie4_5_MoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .module_names = &kModuleNames,
    .read_more = read};

}  // namespace switchyard
