// DBRX: softmax over all experts, the chosen renormalised where moe_normalize_expert_weights is 1;
// experts in three stacks, the last transposed. What the block is lies in ffn_config.
#include "checkpoint/families/families.hpp"

#include <nlohmann/json.hpp>

namespace switchyard {
namespace {

constexpr StackNames kStack = {.gate = "w1",
                               .up = "v1",
                               .down = "w2",
                               .form = StackedForm::kRows,
                               .down_form = StackedForm::kTransposed,
                               .flat = true};
constexpr BlockNames kNames = {
    .router = "ffn.router.layer.weight", .experts = "ffn.experts.mlp.", .stack = &kStack};
// Norms are not RMS norms.
constexpr ModelNames kModel = {
    .stem = "transformer.", .layers = "blocks.", .embedding = "wte.weight", .norm = nullptr};
constexpr ConfigUse kConfig = {.section = "ffn_config",
                               .layers = "n_layers",
                               .hidden = "d_model",
                               .experts = "moe_num_experts",
                               .top_k = "moe_top_k",
                               .inner = "ffn_hidden_size"};

void read(const ConfigReader& json, ModelConfig& config) {
  const ConfigReader ffn = json.object("ffn_config");
  ffn.require_value("moe_normalize_expert_weights", "1");
  // Absent it is 1; null, which counts as absent elsewhere, asks for no renormalisation.
  config.layer.router.as_top_k().renormalize = !ffn.is_null("moe_normalize_expert_weights");
  if (ffn.has("ffn_act_fn")) ffn.object("ffn_act_fn").require_value("name", R"("silu")");
}

void write(const CheckpointRecipe& recipe, Json& json) {
  Json& ffn = json["ffn_config"];
  ffn["ffn_act_fn"] = {{"name", "silu"}};
  ffn["moe_normalize_expert_weights"] =
      recipe.layer.router.as_top_k().renormalize ? Json(1.0) : Json(nullptr);
}

}  // namespace

constinit const Family kDbrx = {
    .name = "dbrx",
    .model_types = {"dbrx"},
    .architecture = "DbrxForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .model = kModel,
    .read_more = read,
    .write_more = write};

}  // namespace switchyard
