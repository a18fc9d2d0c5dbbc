// config.json: read into one form for all families, and written for a recipe, as a family's
// ConfigUse says.
#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#include "checkpoint/families/family.hpp"
#include "checkpoint/files/file_error.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

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
  std::string known;
  for (const Family* family : families()) {
    for (const std::string_view type : family->model_types) {
      if (type.empty()) break;
      if (type == model_type) return *family;
      known += fmt::format(" {}", type);
    }
  }
  bad_file(json.file(), "model_type='{}' is not one of:{}", model_type, known);
}

bool is_sparse(const ConfigReader& json, const std::string& type) {
  require_file(type == "dense" || type == "sparse", json.file(),
               "mlp_layer_types: '{}' is not dense or sparse", type);
  return type == "sparse";
}

/// A list has one entry for each layer, and maybe for others after them.
template <typename Entry, typename IsMoe>
void read_listed(const ConfigReader& json, const char* key, const std::vector<Entry>& entries,
                 const IsMoe& is_moe, ModelConfig& config) {
  require_file(entries.size() >= static_cast<std::size_t>(config.num_layers), json.file(),
               "{} has {} entries for {} layers", key, entries.size(), config.num_layers);
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (is_moe(entries[static_cast<std::size_t>(layer)])) config.moe_layers.push_back(layer);
  }
}

template <typename IsMoe>
void keep_layers(const IsMoe& is_moe, ModelConfig& config) {
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (is_moe(layer)) config.moe_layers.push_back(layer);
  }
}

void read_dense_first(const ConfigReader& json, const ConfigUse& use, ModelConfig& config) {
  if (json.has("mlp_layer_types")) {
    const auto sparse = [&](const std::string& type) { return is_sparse(json, type); };
    return read_listed(json, "mlp_layer_types", json.words("mlp_layer_types"), sparse, config);
  }
  if (json.is_list("moe_layer_freq")) {
    const auto is_moe = [](std::int64_t entry) { return entry != 0; };
    return read_listed(json, "moe_layer_freq", json.list("moe_layer_freq"), is_moe, config);
  }
  const std::int64_t first = json.whole_or("first_k_dense_replace", 0, config.num_layers,
                                           std::min(use.dense_first_absent, config.num_layers));
  const std::int64_t step = json.whole_or("moe_layer_freq", 1, INT32_MAX, 1);
  keep_layers([&](std::int32_t layer) { return layer >= first && layer % step == 0; }, config);
}

void read_moe_layers(const ConfigReader& json, const ConfigUse& use, ModelConfig& config) {
  switch (use.moe_layers) {
    case MoeLayers::kAll: return keep_layers([](std::int32_t) { return true; }, config);
    case MoeLayers::kEveryNth: {
      const std::int64_t step = json.whole_or("decoder_sparse_step", 1, INT32_MAX, 1);
      const std::vector<std::int64_t> dense = json.list("mlp_only_layers");
      return keep_layers(
          [&](std::int32_t layer) {
            return (layer + 1) % step == 0 &&
                   std::find(dense.begin(), dense.end(), layer) == dense.end();
          },
          config);
    }
    case MoeLayers::kDenseFirst:
    case MoeLayers::kTyped: return read_dense_first(json, use, config);
    case MoeLayers::kListed: {
      if (json.has("moe_layers") && !json.is_null("moe_layers")) {
        const std::vector<std::int64_t> listed = json.list("moe_layers");
        for (const std::int64_t layer : listed) {
          require_file(0 <= layer && layer < config.num_layers, json.file(),
                       "moe_layers has {}, which is no layer of {}", layer, config.num_layers);
        }
        return keep_layers(
            [&](std::int32_t layer) {
              return std::find(listed.begin(), listed.end(), layer) != listed.end();
            },
            config);
      }
      const std::int64_t step = json.whole_or("interleave_moe_layer_step", 1, INT32_MAX, 1);
      return keep_layers([&](std::int32_t layer) { return (layer + 1) % step == 0; }, config);
    }
    case MoeLayers::kRange: {
      const std::int64_t first = json.whole_or("moe_layer_start_index", 0, kMaxLayers, 1);
      const std::int64_t end = json.whole_or("moe_layer_end_index", -1, kMaxLayers, -1);
      const std::int64_t last = end < 0 ? config.num_layers - 1 : end;
      const std::int64_t step = json.whole_or("moe_layer_interval", 1, INT32_MAX, 1);
      return keep_layers(
          [&](std::int32_t layer) {
            return (layer + 1) % step == 0 && first <= layer && layer <= last;
          },
          config);
    }
  }
}

std::int64_t shared_width(const ConfigReader& json, const ConfigUse& use, std::int64_t inner) {
  switch (use.shared_width) {
    case SharedWidth::kNone: return 0;
    case SharedWidth::kCounted: return json.whole_or(use.shared, 0, 1024, 0) * inner;
    case SharedWidth::kOwn: return json.whole(use.shared, 0, kMaxWidth);
    case SharedWidth::kInner: return inner;
  }
  return 0;
}

void read_layer(const ConfigReader& json, const ConfigUse& use, LayerConfig& layer) {
  ExpertConfig& experts = layer.experts;
  experts.num_experts = static_cast<std::int32_t>(json.whole(use.experts, 1, kMaxExperts));
  experts.inner = json.whole(use.inner, 1, kMaxWidth);
  if (use.identity != nullptr) {
    const std::int32_t absent = json.is_null(use.identity) ? 0 : use.identity_absent;
    layer.router.zero_computation.copy =
        static_cast<std::int32_t>(json.whole_or(use.identity, 0, kMaxExperts, absent));
  }
  layer.router.num_experts = experts.num_experts + layer.router.zero_computation.copy;
  TopKRouter& router = layer.router.as_top_k();
  router.top_k = static_cast<std::int32_t>(json.whole(use.top_k, 1, layer.router.num_experts));
  if (use.renormalize != nullptr) {
    router.renormalize = json.flag_or(use.renormalize, use.renormalize_absent);
  }
  if (use.scale != nullptr) router.scale = json.real_or(use.scale, 1.0F);
  if (use.groups) read_groups(json, layer.router);
  set_shared(layer, shared_width(json, use, experts.inner));
}

void write_layers(const CheckpointRecipe& recipe, const ConfigUse& use, Json& json) {
  // As in the public ones, the first layer is dense; a model of one layer would have nothing to
  // show.
  const std::int32_t dense = recipe.num_layers > 1 ? 1 : 0;
  switch (use.moe_layers) {
    case MoeLayers::kAll: return;
    case MoeLayers::kEveryNth:
      json["decoder_sparse_step"] = 1;
      json["mlp_only_layers"] = Json::array();
      return;
    case MoeLayers::kDenseFirst: json[use.dense_first] = dense; break;
    case MoeLayers::kTyped: {
      Json types = Json::array();
      for (std::int32_t layer = 0; layer < recipe.num_layers; ++layer) {
        types.push_back(layer < dense ? "dense" : "sparse");
      }
      json["mlp_layer_types"] = types;
      break;
    }
    case MoeLayers::kListed: {
      Json layers = Json::array();
      for (std::int32_t layer = dense; layer < recipe.num_layers; ++layer) layers.push_back(layer);
      json["moe_layers"] = layers;
      break;
    }
    case MoeLayers::kRange:
      json["moe_layer_start_index"] = dense;
      json["moe_layer_end_index"] = recipe.num_layers - 1;
      json["moe_layer_interval"] = 1;
      break;
  }
  json["intermediate_size"] = recipe.layer.experts.inner;  // of the dense layers
}

void write_layer(const CheckpointRecipe& recipe, const ConfigUse& use, Json& json) {
  const LayerConfig& layer = recipe.layer;
  const TopKRouter& router = layer.router.as_top_k();
  write_layers(recipe, use, json);
  json[use.experts] = layer.experts.num_experts;
  json[use.top_k] = router.top_k;
  json[use.inner] = layer.experts.inner;
  if (use.identity != nullptr) json[use.identity] = layer.router.zero_computation.copy;
  if (use.renormalize != nullptr) json[use.renormalize] = router.renormalize;
  if (use.scale != nullptr) json[use.scale] = shortest(router.scale);
  if (use.groups) {
    json["n_group"] = router.groups;
    json["topk_group"] = router.top_groups;
  }
  if (use.shared_width == SharedWidth::kCounted) json[use.shared] = recipe.shared_experts;
  if (use.shared_width == SharedWidth::kOwn) json[use.shared] = layer.shared.inner;
  for (const FixedKey& fixed : use.fixed) {
    if (fixed.written) json[std::string(fixed.key)] = Json::parse(fixed.value);
  }
}

/// Of GPTQ and AWQ what no tensor says: four bits and columns in order, and what zero points are.
void read_words(const ConfigReader& quantization, const std::string& method, ModelConfig& config) {
  quantization.require_value("bits", "4");
  if (method == "awq") {
    const std::string version = quantization.text_or("version", "gemm");
    require_file(version == "gemm" || version == "GEMM", quantization.file(),
                 "version='{}' of awq: only gemm is supported here", version);
    return;
  }
  quantization.require_value("desc_act", "false");
  const std::string format = quantization.text_or("checkpoint_format", "gptq");
  require_file(format == "gptq" || format == "gptq_v2", quantization.file(),
               "checkpoint_format='{}' of gptq: only gptq and gptq_v2 are supported here", format);
  if (format == "gptq_v2") config.gptq_zeros = GptqZeros::kWhole;
}

void read_quantization(const ConfigReader& reader, ModelConfig& config) {
  const char* const key = "quantization_config";
  if (!reader.has(key) || reader.is_null(key)) return;
  const ConfigReader quantization = reader.object(key);
  const std::string method = quantization.text_or("quant_method", "");
  if (method == "gptq" || method == "awq") read_words(quantization, method, config);
  // Scales of fp8 weights belong to blocks of one size only.
  const char* const size = "weight_block_size";
  if (!quantization.has(size) || quantization.is_null(size)) return;
  quantization.require_value(size, "[128,128]");
}

Json quantization_json(const CheckpointRecipe& recipe) {
  if (recipe.dtype == DType::kF8E4M3) {
    return {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {128, 128}}};
  }
  switch (recipe.packing) {
    case WeightPacking::kGptq:
      return {{"quant_method", "gptq"}, {"bits", 4},    {"group_size", made_group(recipe)},
              {"desc_act", false},      {"sym", false}, {"checkpoint_format", "gptq"}};
    case WeightPacking::kAwq:
      return {{"quant_method", "awq"},
              {"bits", 4},
              {"group_size", made_group(recipe)},
              {"zero_point", true},
              {"version", "gemm"}};
    case WeightPacking::kModelOpt: return {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}};
    default: return {{"quant_method", "compressed-tensors"}, {"format", to_string(recipe.packing)}};
  }
}

}  // namespace

std::int64_t made_group(const CheckpointRecipe& recipe) {
  const LayerConfig& layer = recipe.layer;
  for (const std::int64_t group : {128, 64, 32}) {
    if (layer.experts.hidden % group == 0 && layer.experts.inner % group == 0 &&
        layer.shared.inner % group == 0) {
      return group;
    }
  }
  fail(ErrorCode::kInvalidArgument,
       "int4 weights need hidden={} and inner={} to be multiples of 32", layer.experts.hidden,
       layer.experts.inner);
}

ModelConfig read_config(const Json& json, const std::string& file) {
  const ConfigReader whole(json, file);
  ModelConfig config;
  read_quantization(whole, config);
  config.nested = whole.has("text_config");
  const ConfigReader reader = config.nested ? whole.object("text_config") : whole;
  const Family& family = family_of(reader);
  config.family = &family;
  config.layer = family.layer;
  config.stem = family.model.stem;
  config.selection_bias = family.names.selection_bias != nullptr;
  const ConfigUse& use = family.config;
  config.num_layers = static_cast<std::int32_t>(reader.whole(use.layers, 1, kMaxLayers));
  config.vocabulary = reader.whole_or("vocab_size", 1, INT32_MAX, 0);
  config.rms_norm_eps = reader.real_or("rms_norm_eps", config.rms_norm_eps);
  ExpertConfig& experts = config.layer.experts;
  experts.hidden = reader.whole(use.hidden, 1, kMaxWidth);
  if (experts.activation != Activation::kClampedSwiglu) {
    experts.activation = read_activation(reader);
  }
  for (const FixedKey& fixed : use.fixed) reader.require_value(fixed.key, fixed.value);
  read_layer(use.section == nullptr ? reader : reader.object(use.section), use, config.layer);
  read_moe_layers(reader, use, config);
  if (family.read_more != nullptr) family.read_more(reader, config);
  return config;
}

Json write_config(const CheckpointRecipe& recipe) {
  const Family& family = find_family(recipe.family);
  Json json = {{"architectures", {family.architecture}},
               {"model_type", family.model_types.front()},
               {family.config.hidden, recipe.layer.experts.hidden},
               {family.config.layers, recipe.num_layers},
               {"vocab_size", recipe.vocabulary},
               {"hidden_act", name_of(recipe.layer.experts.activation)},
               {"rms_norm_eps", shortest(family.rms_norm_eps)},
               {"torch_dtype", recipe.dtype == DType::kF32   ? "float32"
                               : recipe.dtype == DType::kF16 ? "float16"
                                                             : "bfloat16"}};
  if (recipe.packing != WeightPacking::kPlain || recipe.dtype == DType::kF8E4M3) {
    json["quantization_config"] = quantization_json(recipe);
  }
  const char* section = family.config.section;
  write_layer(recipe, family.config, section == nullptr ? json : json[section]);
  if (family.write_more != nullptr) family.write_more(recipe, json);
  return json;
}

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

void set_shared(LayerConfig& layer, std::int64_t inner) {
  layer.shared = layer.experts;
  layer.shared.num_experts = inner > 0 ? 1 : 0;
  layer.shared.inner = inner;
  layer.shared_gated = layer.shared_gated && inner > 0;
}

Json shortest(float value) { return Json::parse(fmt::format("{}", value)); }

}  // namespace switchyard
