// gpt-oss: the top_k largest logits (with a bias), softmax over the chosen; clamped SwiGLU; biases
// everywhere; experts in MXFP4, or transposed in one tensor.
#include "checkpoint/families/families.hpp"

#include <nlohmann/json.hpp>

namespace switchyard {
namespace {

constexpr StackNames kStack = {.form = StackedForm::kTransposed,
                               .down_form = StackedForm::kTransposed,
                               .interleaved = true,
                               .gate_up_bias = "gate_up_proj_bias",
                               .down_bias = "down_proj_bias",
                               .mxfp4 = true};
constexpr BlockNames kNames = {.router = "mlp.router.weight",
                               .router_bias = "mlp.router.bias",
                               .experts = "mlp.experts.",
                               .stack = &kStack};
// Its activation is its own; the key says "silu" and is not looked at by its code.
constexpr FixedKey kFixed[] = {{"hidden_act", R"("silu")"}};
constexpr ConfigUse kConfig = {
    .experts = "num_local_experts", .inner = "intermediate_size", .fixed = kFixed};

void read(const ConfigReader& json, ModelConfig& config) {
  ExpertConfig& experts = config.layer.experts;
  experts.alpha = json.real_or("swiglu_alpha", experts.alpha);
  experts.limit = json.real_or("swiglu_limit", experts.limit);
}

void write(const CheckpointRecipe& recipe, Json& json) {
  const ExpertConfig& experts = recipe.layer.experts;
  json["swiglu_limit"] = shortest(experts.limit);
  // The released configurations have no such key: 1.702 is what their code has.
  if (experts.alpha != ExpertConfig{}.alpha) json["swiglu_alpha"] = shortest(experts.alpha);
  if (recipe.dtype == DType::kBF16) json["quantization_config"] = {{"quant_method", "mxfp4"}};
}

}  // namespace

constinit const Family kGptOss = {
    .name = "gpt-oss",
    .model_types = {"gpt_oss"},
    .architecture = "GptOssForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kTopkSoftmax, .renormalize = true}},
              .experts = {.activation = Activation::kClampedSwiglu, .bias = true}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .read_more = read,
    .write_more = write};

}  // namespace switchyard
