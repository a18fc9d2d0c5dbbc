// The table of families, and what config.json has in common to all of them.
#include <algorithm>

#include "checkpoint/families/family.hpp"
#include "checkpoint/files/file_error.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

constexpr std::array<const Family*, 7> kFamilies = {
    &kMixtral, &kQwen3Moe, &kOlmoe, &kDeepseekV2, &kDeepseekV3, &kGptOss, &kQwen2Moe};

constexpr std::int64_t kMaxLayers = 10'000;

struct ActivationName {
  std::string_view name;
  Activation activation;
};
// hidden_act as the public configurations spell it; the first of a kind is written.
constexpr std::array<ActivationName, 7> kActivations = {
    {{"silu", Activation::kSilu},
     {"swish", Activation::kSilu},
     {"gelu", Activation::kGelu},
     {"gelu_pytorch_tanh", Activation::kGeluTanh},
     {"gelu_new", Activation::kGeluTanh},
     {"relu", Activation::kRelu},
     {"relu2", Activation::kRelu2}}};

Activation read_activation(const ConfigReader& json) {
  const std::string name = json.text_or("hidden_act", "silu");
  for (const ActivationName& candidate : kActivations) {
    if (candidate.name == name) return candidate.activation;
  }
  bad_file(json.file(), "hidden_act='{}' is not known", name);
}

/// gpt-oss writes "silu" and means its own.
std::string_view name_of(Activation activation) {
  for (const ActivationName& candidate : kActivations) {
    if (candidate.activation == activation) return candidate.name;
  }
  return "silu";
}

const Family& family_of(const ConfigReader& json) {
  require_file(json.has("model_type"), json.file(), "lacks 'model_type'");
  const std::string model_type = json.text_or("model_type", "");
  for (const Family* family : kFamilies) {
    const auto& types = family->model_types;
    if (!model_type.empty() && std::find(types.begin(), types.end(), model_type) != types.end()) {
      return *family;
    }
  }
  std::string known;
  for (const Family* family : kFamilies) known += fmt::format(" {}", family->model_types.front());
  bad_file(json.file(), "model_type='{}' is not one of:{}", model_type, known);
}

}  // namespace

std::span<const Family* const> families() { return kFamilies; }

const Family& find_family(std::string_view name) {
  std::string known;
  for (const Family* family : kFamilies) {
    if (family->name == name) return *family;
    known += fmt::format(" {}", family->name);
  }
  fail(ErrorCode::kInvalidArgument, "family '{}' is not one of:{}", name, known);
}

ModelConfig read_config(const Json& json, const std::string& file) {
  const ConfigReader reader(json, file);
  const Family& family = family_of(reader);
  ModelConfig config;
  config.family = &family;
  config.layer = family.layer;
  config.num_layers = static_cast<std::int32_t>(reader.whole("num_hidden_layers", 1, kMaxLayers));
  config.vocabulary = reader.whole_or("vocab_size", 1, INT32_MAX, 0);
  config.rms_norm_eps = reader.real_or("rms_norm_eps", config.rms_norm_eps);
  ExpertConfig& experts = config.layer.experts;
  experts.hidden = reader.whole("hidden_size", 1, kMaxWidth);
  if (experts.activation != Activation::kClampedSwiglu) {
    experts.activation = read_activation(reader);
  }
  family.read_config(reader, config);
  return config;
}

Json write_config(const CheckpointRecipe& recipe) {
  const Family& family = find_family(recipe.family);
  Json json = {{"architectures", {family.architecture}},
               {"model_type", family.model_types.front()},
               {"hidden_size", recipe.layer.experts.hidden},
               {"num_hidden_layers", recipe.num_layers},
               {"vocab_size", recipe.vocabulary},
               {"num_experts_per_tok", recipe.layer.router.top_k()},
               {"hidden_act", name_of(recipe.layer.experts.activation)},
               {"rms_norm_eps", Json::parse(fmt::format("{}", family.rms_norm_eps))},
               {"torch_dtype", recipe.dtype == DType::kF32   ? "float32"
                               : recipe.dtype == DType::kF16 ? "float16"
                                                             : "bfloat16"}};
  family.write_config(recipe, json);
  return json;
}

std::string layer_prefix(std::int32_t layer) { return fmt::format("model.layers.{}.", layer); }

void read_experts(const ConfigReader& json, const char* experts_key, const char* inner_key,
                  ModelConfig& config) {
  LayerConfig& layer = config.layer;
  layer.experts.num_experts = static_cast<std::int32_t>(json.whole(experts_key, 1, kMaxExperts));
  layer.experts.inner = json.whole(inner_key, 1, kMaxWidth);
  layer.router.num_experts = layer.experts.num_experts;
  // The original release of gpt-oss spells it the other way.
  const char* top_k = json.has("num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token";
  layer.router.as_top_k().top_k = static_cast<std::int32_t>(
      json.whole(json.has(top_k) ? top_k : "num_experts_per_tok", 1, layer.experts.num_experts));
}

void set_shared(LayerConfig& layer, std::int64_t inner) {
  layer.shared = layer.experts;
  layer.shared.num_experts = inner > 0 ? 1 : 0;
  layer.shared.inner = inner;
  layer.shared_gated = layer.shared_gated && inner > 0;
}

void every_layer_is_moe(ModelConfig& config) {
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    config.moe_layers.push_back(layer);
  }
}

}  // namespace switchyard
