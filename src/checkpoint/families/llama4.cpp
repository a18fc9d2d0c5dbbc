// Llama 4: the largest logit's sigmoid multiplies the token before its expert takes it, and not
// what the expert makes of it; a shared expert of the same width. Experts in two stacks,
// transposed.
#include "checkpoint/families/families.hpp"

#include <nlohmann/json.hpp>

namespace switchyard {
namespace {

constexpr StackNames kStack = {.form = StackedForm::kTransposed,
                               .down_form = StackedForm::kTransposed};
constexpr BlockNames kNames = {.router = "feed_forward.router.weight",
                               .experts = "feed_forward.experts.",
                               .stack = &kStack,
                               .shared = "feed_forward.shared_expert."};
// Its code takes any number of experts, each with a token of its own; all releases have one.
constexpr FixedKey kFixed[] = {{"num_experts_per_tok", "1"}};
constexpr ConfigUse kConfig = {.experts = "num_local_experts",
                               .inner = "intermediate_size",
                               .shared_width = SharedWidth::kInner,
                               .moe_layers = MoeLayers::kListed,
                               .fixed = kFixed};

void write(const CheckpointRecipe& recipe, Json& json) {
  json["intermediate_size_mlp"] = recipe.layer.experts.inner;  // of the dense layers
}

}  // namespace

constinit const Family kLlama4 = {
    .name = "llama4",
    .model_types = {"llama4_text"},
    .architecture = "Llama4ForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSigmoid, .renormalize = false}},
              .weight_on_input = true},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .write_more = write};

}  // namespace switchyard
