#pragma once

// Layers of public models by name: the one home of their shapes, compiled in from
// data/models.json.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/checkpoint.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

struct NamedModel {
  std::string name;
  std::string family;
  LayerConfig layer;
  std::int32_t shared_experts = 0;  ///< S; layer.shared.inner = S * I.
  bool selection_bias = false;      ///< The router has one.
  bool router_bias = false;         ///< The router has one.
};

/// In the order of the file.
[[nodiscard]] const std::vector<NamedModel>& named_models();
/// @throws Error{kInvalidArgument} that lists the names.
[[nodiscard]] const NamedModel& find_model(std::string_view name);

/// Sizes that a family's layer is to have; 0 groups: as the family has them by default (one).
struct LayerSizes {
  std::int64_t hidden = 0;
  std::int64_t inner = 0;
  std::int32_t num_experts = 0;
  std::int32_t top_k = 0;
  std::int32_t shared_experts = 0;
  std::int32_t groups = 1;
  std::int32_t top_groups = 1;
};

/// A family's routing rule and activation with those sizes, as make_checkpoint() takes it.
/// @throws Error{kInvalidArgument}: no such family.
[[nodiscard]] CheckpointRecipe family_recipe(std::string_view family, const LayerSizes& sizes);
[[nodiscard]] CheckpointRecipe model_recipe(const NamedModel& model);

}  // namespace switchyard
