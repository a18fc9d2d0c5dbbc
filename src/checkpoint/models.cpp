#include "checkpoint/models.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>

#include "checkpoint/config_reader.hpp"
#include "checkpoint/families/family.hpp"
#include "checkpoint/files/file_error.hpp"
#include "checkpoint/models_json.hpp"
#include "core/check.hpp"
#include "switchyard/names.hpp"

namespace switchyard {
namespace {

NamedModel read_model(const std::string& name, const Json& json) {
  constexpr std::int64_t kMost = INT32_MAX;
  const ConfigReader reader(json, "data/models.json " + name);
  const auto small = [&](const char* key) {
    return static_cast<std::int32_t>(reader.whole(key, 0, kMost));
  };
  NamedModel model;
  model.name = name;
  model.family = reader.text_or("family", "");
  model.shared_experts = small("S");
  model.layer = family_recipe(model.family, {.hidden = reader.whole("H", 1, kMost),
                                             .inner = reader.whole("I", 1, kMost),
                                             .num_experts = small("E"),
                                             .top_k = small("K"),
                                             .shared_experts = model.shared_experts,
                                             .groups = small("groups"),
                                             .top_groups = small("top_groups")})
                    .layer;
  TopKRouter& router = model.layer.router.as_top_k();
  const std::string score = reader.text_or("score", to_string(Score::kSoftmax));
  const std::optional<Score> known = parse<Score>(score);
  require_file(known.has_value(), reader.file(), "score='{}' is unknown", score);
  router.score = *known;
  router.renormalize = reader.flag_or("renormalize", true);
  router.scale = reader.real_or("scale", 1.0F);
  model.selection_bias = reader.flag_or("selection_bias", false);
  model.router_bias = reader.flag_or("router_bias", false);
  return model;
}

std::vector<NamedModel> read_models() {
  const auto json = nlohmann::ordered_json::parse(kModelsJson);
  std::vector<NamedModel> models;
  for (const auto& [name, model] : json.at("models").items()) {
    models.push_back(read_model(name, Json::parse(model.dump())));
  }
  return models;
}

}  // namespace

const std::vector<NamedModel>& named_models() {
  static const std::vector<NamedModel> models = read_models();
  return models;
}

const NamedModel& find_model(std::string_view name) {
  std::string known;
  for (const NamedModel& model : named_models()) {
    if (model.name == name) return model;
    known += " " + model.name;
  }
  fail(ErrorCode::kInvalidArgument, "model '{}' is not one of:{}", name, known);
}

CheckpointRecipe family_recipe(std::string_view family, const LayerSizes& sizes) {
  CheckpointRecipe recipe;
  recipe.family = family;
  recipe.layer = find_family(family).layer;
  recipe.shared_experts = sizes.shared_experts;
  LayerConfig& layer = recipe.layer;
  layer.experts.num_experts = sizes.num_experts;
  layer.experts.hidden = sizes.hidden;
  layer.experts.inner = sizes.inner;
  // As many for each other expert as LongCat-Flash has.
  if (find_family(family).config.identity != nullptr) {
    layer.router.zero_computation.copy = std::max(1, sizes.num_experts / 2);
  }
  layer.router.num_experts = sizes.num_experts + layer.router.zero_computation.copy;
  TopKRouter& router = layer.router.as_top_k();
  router.top_k = sizes.top_k;
  router.groups = sizes.groups;
  router.top_groups = sizes.top_groups;
  set_shared(layer, sizes.shared_experts * sizes.inner);
  return recipe;
}

CheckpointRecipe model_recipe(const NamedModel& model) {
  CheckpointRecipe recipe;
  recipe.family = model.family;
  recipe.layer = model.layer;
  recipe.shared_experts = model.shared_experts;
  return recipe;
}

}  // namespace switchyard
