// gpt-oss: the top_k largest logits (with a bias), softmax over the chosen; clamped SwiGLU; biases
// everywhere; experts in MXFP4, or transposed in one tensor.
#include "checkpoint/families/family.hpp"
#include "checkpoint/sources/expert_source.hpp"
#include "core/check.hpp"
#include "core/mxfp4.hpp"

namespace switchyard {
namespace {

void read(const ConfigReader& json, ModelConfig& config) {
  read_experts(json, "num_local_experts", "intermediate_size", config);
  config.layer.experts.limit = json.real_or("swiglu_limit", config.layer.experts.limit);
  every_layer_is_moe(config);
}

/// MXFP4 is what the public checkpoints have; other types than bf16 ask for plain weights.
bool is_quantised(const CheckpointRecipe& recipe) { return recipe.dtype == DType::kBF16; }

void write(const CheckpointRecipe& recipe, Json& json) {
  json["num_local_experts"] = recipe.layer.experts.num_experts;
  json["intermediate_size"] = recipe.layer.experts.inner;
  json["swiglu_limit"] = Json::parse(fmt::format("{}", recipe.layer.experts.limit));
  if (is_quantised(recipe)) json["quantization_config"] = {{"quant_method", "mxfp4"}};
}

LayerModel load(const std::shared_ptr<const TensorSet>& tensors, const ModelConfig& config,
                const std::string& layer_prefix) {
  const ExpertConfig& experts = config.layer.experts;
  LayerModel model;
  model.config = config.layer;
  model.gate =
      tensors->floats(layer_prefix + "mlp.router.weight", {experts.num_experts, experts.hidden});
  model.router_bias = tensors->floats(layer_prefix + "mlp.router.bias", {experts.num_experts});
  model.experts = make_interleaved_source(tensors, experts, layer_prefix + "mlp.experts.");
  return model;
}

std::vector<MadeTensor> list(const CheckpointRecipe& recipe, const std::string& layer_prefix) {
  const ExpertConfig& experts = recipe.layer.experts;
  const std::int64_t num_experts = experts.num_experts;
  const std::int64_t hidden = experts.hidden;
  const std::int64_t inner = experts.inner;
  const StoredType type = stored_type(recipe.dtype);
  const std::string prefix = layer_prefix + "mlp.experts.";
  std::vector<MadeTensor> tensors = {
      {{layer_prefix + "mlp.router.weight", type, {num_experts, hidden}}, Fill::kWeight, hidden},
      {{layer_prefix + "mlp.router.bias", type, {num_experts}}, Fill::kBias},
      {{prefix + "gate_up_proj_bias", type, {num_experts, 2 * inner}}, Fill::kBias},
      {{prefix + "down_proj_bias", type, {num_experts, hidden}}, Fill::kBias}};
  const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t cols) {
    if (!is_quantised(recipe)) {
      tensors.push_back({{prefix + name, type, {num_experts, cols, rows}}, Fill::kWeight, cols});
      return;
    }
    require(cols % kMxfp4Block == 0,
            "gpt-oss in MXFP4 needs hidden={} and inner={} to be multiples of {}; f32 and f16 are "
            "written without it",
            hidden, inner, kMxfp4Block);
    const std::int64_t blocks = cols / kMxfp4Block;
    tensors.push_back({{prefix + name + "_blocks",
                        StoredType::kU8,
                        {num_experts, rows, blocks, kMxfp4BlockBytes}},
                       Fill::kBytes});
    tensors.push_back({{prefix + name + "_scales", StoredType::kU8, {num_experts, rows, blocks}},
                       Fill::kMxfp4Scale,
                       cols});
  };
  add("gate_up_proj", 2 * inner, hidden);
  add("down_proj", hidden, inner);
  return tensors;
}

}  // namespace

const Family kGptOss = {
    .name = "gpt-oss",
    .model_types = {"gpt_oss"},
    .architecture = "GptOssForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kTopkSoftmax, .renormalize = true}},
              .experts = {.activation = Activation::kClampedSwiglu, .bias = true}},
    .rms_norm_eps = 1e-5F,
    .read_config = read,
    .write_config = write,
    .load = load,
    .list = list};

}  // namespace switchyard
